"""Which tokens a grammar allows at each position, for constrained decoding and for training on its result.

Rollout samples from the softmax over the allowed tokens. The masks are recorded with the tokens, so that the trainer
computes the same distribution whatever version of the grammar library it has, or without any.

A mask is little-endian bits, one per token id of the model's vocabulary, padded to 4 bytes. llguidance compiles the
grammars (`pip install 'rally-rl[structured]'`). Its limits bound the time and memory of a hostile grammar.

Shapes: U positions, V vocabulary, R masked rows, K different masks, W bytes of a mask.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tokenizers import decoders
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rally.types import RallyError

MASKED = -1e30
"""The logit of a token that is not allowed. Its probability is exactly 0, and 0 times its logarithm is 0, not NaN."""
MAX_CACHED = 256  # compiled grammars
LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "max_lexer_states": 50_000}
LIMITS |= {"max_grammar_size": 100_000, "step_max_items": 50_000}
COMPILE_SECONDS = 10.0
MAX_MASKS = 2**31  # bytes of one generation's masks, decompressed


class GrammarError(RallyError):
    """A grammar that cannot be compiled, or that failed while it was applied."""


class TokenMasks(NamedTuple):
    """The masks of some rows of logits: row `rows[i]` may only have the tokens of `bits[i]`."""

    rows_R: Tensor
    bits_RW: Tensor  # uint8

    @classmethod
    def of(cls, rows: Sequence[int], masks: Sequence[bytes], device: torch.device) -> TokenMasks:
        bits = np.frombuffer(b"".join(masks), np.uint8).reshape(len(masks), -1)
        return cls(torch.tensor(rows, device=device), torch.from_numpy(bits.copy()).to(device))

    def within(self, first: int, end: int) -> TokenMasks | None:
        """Those of rows [first, end), counted from `first`; None without any."""
        inside = (self.rows_R >= first) & (self.rows_R < end)
        if not bool(inside.any()):
            return None
        return TokenMasks(self.rows_R[inside] - first, self.bits_RW[inside])

    def applied(self, logits_XV: Tensor) -> Tensor:
        """The logits with MASKED for tokens that are not allowed. Other rows are unchanged."""
        size = logits_XV.shape[1]
        shifts = torch.arange(8, dtype=torch.uint8, device=self.bits_RW.device)
        allowed_RV = ((self.bits_RW[:, :, None] >> shifts) & 1).flatten(1)[:, :size].bool()
        refused_XV = torch.zeros(logits_XV.shape, dtype=torch.bool, device=logits_XV.device)
        refused_XV[self.rows_R] = ~allowed_RV
        return logits_XV.masked_fill(refused_XV, MASKED)


def compressed(masks: Sequence[bytes]) -> bytes:
    """Masks as a ConstrainedSpan holds them: how many, the size of one, the number of each position's mask among the
    different ones, and these. All numbers are little-endian uint32, and zlib compresses the whole."""
    different = {mask: number for number, mask in enumerate(dict.fromkeys(masks))}
    width = len(masks[0]) if masks else 0
    numbers = np.array([len(masks), width, *(different[mask] for mask in masks)], "<u4")
    return zlib.compress(numbers.tobytes() + b"".join(different), level=1)


def decompressed(data: bytes) -> list[bytes]:
    """The mask of each position. Equal ones are one object."""
    reader, damaged = zlib.decompressobj(), "the masks of a constrained span cannot be read; the episode is damaged"
    try:
        raw = reader.decompress(data, MAX_MASKS)
    except zlib.error as problem:
        raise GrammarError(f"{damaged} ({problem})") from None
    if reader.unconsumed_tail or not reader.eof or len(raw) < 8:
        raise GrammarError(damaged)
    count, width = (int(n) for n in np.frombuffer(raw[:8], "<u4"))
    if len(raw) < 8 + 4 * count:
        raise GrammarError(damaged)
    numbers, bits = np.frombuffer(raw[8 : 8 + 4 * count], "<u4"), raw[8 + 4 * count :]
    different = [bits[at : at + width] for at in range(0, len(bits), width)] if width else []
    if count and int(numbers.max()) >= len(different):
        raise GrammarError(damaged)
    return [different[number] for number in numbers.tolist()]


class GrammarState:
    """One generation under a grammar: the mask of its next token, and those of the tokens so far."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._known: dict[bytes, bytes] = {}  # equal masks are kept once
        self._next: bytes | None = None
        self.masks: list[bytes] = []

    def mask(self) -> bytes:
        """The mask of the next token."""
        if self._next is None:
            try:
                mask = bytes(self._matcher.compute_bitmask())
            except ValueError as problem:
                raise GrammarError(_failed(str(problem))) from problem
            if self._matcher.is_error():
                raise GrammarError(_failed(self._matcher.get_error()))
            self._next = self._known.setdefault(mask, mask)
        return self._next

    def consume(self, token: int) -> None:
        """Add the token that was sampled under `mask`."""
        mask = self.mask()
        if not self._matcher.consume_token(token):
            raise GrammarError(_failed(self._matcher.get_error()))
        self.masks.append(mask)
        self._next = None

    @property
    def ended(self) -> bool:
        """Whether no further token is possible."""
        return bool(self._matcher.is_stopped())


class Grammars:
    """Compiles grammars for one tokenizer and model. A generation may end, where its grammar allows it, with any of
    `end_ids`. May be used from several threads. A grammar that takes too long to compile is refused; the library goes
    on with it in one of two threads, outside of the interpreter lock."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, end_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocabulary, self._end_ids = tokenizer, vocabulary, tuple(end_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()  # the least recently used first

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._end_ids

    def state(self, grammar: str) -> GrammarState:
        """A new generation under the grammar. Raises GrammarError if it cannot be compiled."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            tokenizer = self._library_tokenizer if matcher is None else None
        if matcher is None:
            compiling = _compilers().submit(self._compile, grammar, tokenizer)
            try:
                matcher = compiling.result(COMPILE_SECONDS)
            except TimeoutError:
                compiling.cancel()
                raise GrammarError(_failed(f"it takes longer than {COMPILE_SECONDS:g} seconds to compile")) from None
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return GrammarState(matcher.deep_copy())

    def _compile(self, grammar: str, tokenizer: Any) -> Any:
        llguidance = _library()
        matcher = llguidance.LLMatcher(
            tokenizer,
            llguidance.LLMatcher.grammar_from_lark(grammar),
            log_level=0,
            limits=llguidance.LLParserLimits(**LIMITS, verbose_errors=False),
        )
        if matcher.is_error():
            raise GrammarError(_refused(matcher.get_error()))
        GrammarState(matcher.deep_copy()).mask()  # some grammars fail only here
        return matcher

    @property
    def _library_tokenizer(self) -> Any:
        """Made once, which takes seconds for a large vocabulary."""
        if not hasattr(self, "_made"):
            self._made = _library_tokenizer(self._tokenizer, self._vocabulary, list(self._end_ids))
        return self._made


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="rally-grammars")


def _refused(reason: str) -> str:
    return f"the schema cannot be applied ({_short(reason)}); change it, or leave the constraint out"


def _failed(reason: str) -> str:
    return f"the schema is too complex to apply ({_short(reason)}); simplify it, or leave the constraint out"


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= 300 else f"{line[:300]}..."


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise GrammarError(
            "constrained decoding (response_format, tool_choice) needs llguidance; run: "
            "pip install 'rally-rl[structured]'"
        ) from None
    return llguidance


def _library_tokenizer(tokenizer: PreTrainedTokenizerBase, vocabulary: int, end_ids: list[int]) -> Any:
    llguidance = _library()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise GrammarError("constrained decoding needs a fast tokenizer (tokenizer.json); convert it")
    if isinstance(backend.decoder, decoders.Fuse):  # each piece is its own text
        pieces = _Pieces(tokenizer, vocabulary, end_ids[0])
        wrapper = llguidance.TokenizerWrapper(pieces)
        return llguidance.LLTokenizer(wrapper, n_vocab=vocabulary, eos_token=end_ids)
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(cast(Any, tokenizer), n_vocab=vocabulary, eos_token=end_ids)
    except ValueError as problem:
        raise GrammarError(f"constrained decoding does not support this tokenizer: {problem}") from problem


class _Pieces:
    """A tokenizer whose pieces are their own text, as llguidance reads it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, eos: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos, None
        added = tokenizer.added_tokens_decoder
        self.special_token_ids = [i for i, token in added.items() if token.special]
        pieces = {i: piece for piece, i in tokenizer.get_vocab().items()}
        self.tokens = [pieces.get(i, "").encode() for i in range(vocabulary)]

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
