"""A text becomes the same vector, to rounding, whatever else is in its batch; texts that were cut are counted.

Runs the encoder through transformers. Shapes: B texts of a batch, T tokens, H the width of the vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rally.hub import on_disk_alone
from rally.retrieval.errors import RetrievalError
from rally.retrieval.recipe import Pooling, Recipe

if TYPE_CHECKING:
    import torch

BATCH = 64


class Encoded(NamedTuple):
    vectors: np.ndarray[Any, Any]
    """One row of float32 per text."""
    cut: int
    """How many texts were longer than the encoder reads."""


class Encoder:
    def __init__(self, model: str, recipe: Recipe, device: str) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        try:
            found, dtype = on_disk_alone(model), torch.float32 if device == "cpu" else torch.float16
            self._tokenizer = AutoTokenizer.from_pretrained(model, **found)
            loaded = AutoModel.from_pretrained(model, dtype=dtype, adapter_kwargs=found, **found)
        except (OSError, ValueError) as error:
            raise RetrievalError(f"the encoder {model} cannot be loaded ({str(error).splitlines()[0]})") from None
        self._model = loaded.to(device).eval()
        positions = getattr(loaded.config, "max_position_embeddings", None) or recipe.max_length
        self._max_length = min(recipe.max_length, positions, self._tokenizer.model_max_length)
        self._recipe = recipe
        self._device = device

    @property
    def width(self) -> int:
        return int(self._model.config.hidden_size)

    def queries(self, texts: Sequence[str]) -> Encoded:
        return self._encode([self._recipe.query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> Encoded:
        return self._encode([self._recipe.passage_prefix + text for text in texts])

    def _encode(self, texts: list[str]) -> Encoded:
        """In batches of about the same length, so that little of a batch is padding."""
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        vectors, cut = np.empty((len(clean), self.width), dtype=np.float32), 0
        by_length = sorted(range(len(clean)), key=lambda index: len(clean[index]))
        for start in range(0, len(clean), BATCH):
            rows = by_length[start : start + BATCH]
            vectors[rows], cut_here = self._encode_batch([clean[row] for row in rows])
            cut += cut_here
        return Encoded(vectors, cut)

    def _encode_batch(self, texts: list[str]) -> Encoded:
        import torch

        # One too many tells a text that is cut from one that just fits.
        longer = self._tokenizer(texts, truncation=True, max_length=self._max_length + 1)
        batch = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self._max_length, return_tensors="pt"
        ).to(self._device)
        with torch.inference_mode():
            hidden_BTH = self._model(**batch).last_hidden_state.float()
            vectors_BH = pool(hidden_BTH, batch.attention_mask, self._recipe.pooling)
            if self._recipe.normalize:
                vectors_BH = torch.nn.functional.normalize(vectors_BH, dim=-1)
        return Encoded(vectors_BH.cpu().numpy(), sum(len(ids) > self._max_length for ids in longer.input_ids))


def pool(hidden_BTH: torch.Tensor, mask_BT: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """One vector per text from those of its tokens; padding, on either side, has no part in it."""
    import torch

    rows_B = torch.arange(len(hidden_BTH), device=hidden_BTH.device)
    if pooling == "cls":
        return hidden_BTH[rows_B, mask_BT.argmax(dim=1)]
    if pooling == "last":
        last_B = mask_BT.shape[1] - 1 - mask_BT.flip(1).argmax(dim=1)
        return hidden_BTH[rows_B, last_B]
    mask_BT1 = mask_BT.unsqueeze(-1).bool()
    if pooling == "max":
        return hidden_BTH.masked_fill(~mask_BT1, float("-inf")).amax(dim=1)
    return hidden_BTH.masked_fill(~mask_BT1, 0.0).sum(dim=1) / mask_BT1.sum(dim=1)
