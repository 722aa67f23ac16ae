"""Measures what one step's batch costs rank 0 before anything is computed: rows, division, messages, memory.

    python -m benchmarks.batch_plan [--tokens 160e6] [--ranks 8] [--length 20000] [--prompt 4000] [--micro 32768]

Groups of eight episodes share a prompt. An episode alternates sampled turns of about 1,000 tokens and observations of
about 500; its length varies by a factor of four. Ids and log-probabilities are random numbers. Rows are built from
episodes for at most 4 million tokens, because episodes hold Python tuples; the time per token is what is printed.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from rally.algos.credit_assignment import CreditSettings, Scored, token_advantages
from rally.distributed.message_encoding import decode, encode
from rally.models.sharding import Alone, M
from rally.train.batch import batch_of
from rally.train.micro_batches import MicroBatchLimits, micro_batches_for, parts_of, share_of
from rally.train.packing import FIELDS, Row, SortedRows
from rally.types import Segment

ANSWERS = 8
VOCABULARY = 150_000
SAMPLED, OBSERVED = 1000, 500  # tokens of a turn, on average
MOST_FROM_TUPLES = 4_000_000
T = TypeVar("T")


@dataclass
class Sender(Alone):
    """Rank 0 of several. It encodes what it would send, decodes it as the other ranks would, and keeps the figures."""

    world_size: int  # type: ignore[misc]
    bytes_sent: int = 0
    encoding: float = 0.0
    decoding: float = 0.0

    def scatter(self, messages: Sequence[M]) -> M:
        for message in messages:  # rank 0 does not send its own; here it stands for one more rank
            content, seconds = timed(encode, message)
            self.bytes_sent, self.encoding = self.bytes_sent + len(content), self.encoding + seconds
            self.decoding += timed(decode, content)[1]
        return messages[0]


def timed(work: Callable[..., T], *given: Any) -> tuple[T, float]:
    """The result, and the seconds of CPU: other work on the machine does not count."""
    began = time.process_time()
    result = work(*given)
    return result, time.process_time() - began


def rows_at_random(tokens: int, length: int, prompt: int, seed: int = 0) -> list[Row]:
    """Groups of `ANSWERS` rows, about `tokens` in all."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in range(max(1, round(tokens / length / ANSWERS))):
        question = rng.integers(0, VOCABULARY, prompt, np.int32)
        for _ in range(ANSWERS):
            size = int(max(1, length - prompt) * rng.uniform(0.4, 1.6))
            turns = rng.integers(1, 2 * np.array([SAMPLED, OBSERVED] * (size // SAMPLED + 1)))
            mask = np.repeat(np.arange(len(turns)) % 2 == 0, turns)[:size]
            sampled = (np.flatnonzero(mask) + prompt).astype(np.int32)
            rows.append(
                Row(
                    ids=np.concatenate([question, rng.integers(0, VOCABULARY, len(mask), np.int32)]),
                    sampled=sampled,
                    logprobs=-rng.random(len(sampled), np.float32),
                    episode=len(rows),
                )
            )
    order = rng.permutation(len(rows) // ANSWERS)
    return [row for group in order for row in rows[group * ANSWERS : (group + 1) * ANSWERS]]


def scored_at_random(rows: Sequence[Row]) -> Scored:
    return Scored(
        rewards_N=torch.rand(len(rows), dtype=torch.float64),
        groups_N=torch.arange(len(rows)) // ANSWERS,
        tokens_N=torch.tensor([len(row.sampled) for row in rows]),
    )


def segments_of(rows: Sequence[Row]) -> list[Segment]:
    """Episodes as a rollout records them, up to `MOST_FROM_TUPLES` tokens."""
    segments, tokens = [], 0
    for row in rows:
        tokens += len(row.ids)
        if segments and tokens > MOST_FROM_TUPLES:
            break
        prompt, logprobs = int(row.sampled[0]), np.zeros(len(row.ids))
        logprobs[row.sampled] = row.logprobs
        ids, mask = tuple(row.ids.tolist()), row.mask[prompt:].astype(int).tolist()
        segments.append(
            Segment(
                prompt_ids=ids[:prompt],
                response_ids=ids[prompt:],
                response_mask=tuple(mask),
                response_logprobs=tuple(logprobs[prompt:].tolist()),
            )
        )
    return segments


def peak() -> float:
    """The largest resident memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measure(tokens: int, ranks: int, length: int, prompt: int, micro: int) -> list[tuple[str, str]]:
    rows = rows_at_random(tokens, length, prompt)
    total = sum(len(row.ids) for row in rows)
    sampled = sum(len(row.sampled) for row in rows)
    segments = segments_of(rows)
    some = sum(len(segment.ids) for segment in segments)
    _, from_tuples = timed(lambda given: [Row.of(segment, i) for i, segment in enumerate(given)], segments)
    del segments
    before = peak()
    scored = scored_at_random(rows)
    batch, advantages = timed(lambda: batch_of(rows, scored, token_advantages(scored, CreditSettings())))
    held = sum(getattr(row, name).nbytes for row in batch.rows for name in FIELDS)
    ordered, sorting = timed(SortedRows, batch.rows)
    once = ordered.computed
    del ordered
    sender = Sender(world_size=ranks)
    rounds, planning = timed(micro_batches_for, sender, batch.rows, MicroBatchLimits(micro))
    planned = peak()
    computed = sum(SortedRows(part).computed for part in parts_of(rounds))
    share_of(sender, rounds)
    return [
        ("batch", f"{len(rows)} rows, {total / 1e6:.1f} M tokens, {sampled / total:.0%} sampled"),
        ("without shared prefixes", f"{once / 1e6:.1f} M tokens; {computed / 1e6:.1f} M computed in micro-batches"),
        ("rows from episodes", f"{from_tuples / some * 1e9:.0f} ns a token ({some / 1e6:.1f} M tokens)"),
        ("advantages", f"{advantages:.2f} s"),
        ("sort and prefixes alone", f"{sorting:.2f} s"),
        ("plan: sort, prefixes, cuts", f"{planning:.2f} s, {len(parts_of(rounds))} micro-batches for {ranks} ranks"),
        ("encoding for all ranks", f"{sender.encoding:.2f} s"),
        ("decoding by one rank", f"{sender.decoding / ranks:.2f} s"),
        ("on the wire", f"{sender.bytes_sent / computed:.2f} bytes a computed token, {sender.bytes_sent / 1e9:.2f} GB"),
        ("rows in memory", f"{held / total:.2f} bytes a token, {held / 1e9:.2f} GB"),
        ("peak memory", f"{before:.2f} GB with the rows, {planned:.2f} after the plan, {peak():.2f} after all"),
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=160e6)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--length", type=int, default=20_000, help="tokens of an episode, on average")
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--micro", type=int, default=32_768, help="most tokens of a micro-batch")
    given = parser.parse_args(words)
    for name, value in measure(int(given.tokens), given.ranks, given.length, given.prompt, given.micro):
        print(f"{name:28} {value}", flush=True)


if __name__ == "__main__":
    main()
