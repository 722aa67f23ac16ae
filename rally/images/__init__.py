"""Images of rows and tools: loading them, and converting them to the patches of a vision model."""

from rally.images.loading import ImageError, decoded, has_images, image_parts, is_image, loaded_images, read_image
from rally.images.patches import Patches

__all__ = [
    "ImageError",
    "Patches",
    "decoded",
    "has_images",
    "image_parts",
    "is_image",
    "loaded_images",
    "read_image",
]
