"""Recipe: read figures, with images in the prompt."""
