"""The memory that one rank needs for the update of one long row, when 1, 2 and 4 ranks divide its tokens (Ulysses).

Launch: python -m benchmarks.sequence_parallel [TOKENS]. Each rank is a process on the CPU with one thread. The model is
a small random Qwen2 without gradient checkpointing; the numbers are the growth of the peak resident memory and the CPU
seconds of a forward and backward pass.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from rally.distributed.process_group import ProcessGroup, RankLayout, Rendezvous
from rally.distributed.worker import Worker
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import Row, pack

SIZES, VOCABULARY = (1, 2, 4), 512


def measured(rank: int, size: int, place: str, tokens: int) -> tuple[float, float]:
    """MiB and CPU seconds of one forward and backward pass."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, max_position_embeddings=tokens, **shape, **heads))
    group = ProcessGroup(rank, size, Rendezvous(place=place, secret="benchmark"), "cpu", 600.0)
    Worker(group, layout=RankLayout(sequence_size=size)).shard(model)
    model.train()

    def update(count: int) -> None:
        ids = np.random.default_rng(0).integers(0, VOCABULARY, count).astype(np.int32)
        sampled = np.arange(count // 2, count, dtype=np.int32)
        row = Row(ids=ids, sampled=sampled, logprobs=np.zeros(len(sampled), np.float32), episode=0)
        token_logprobs(model, pack([row], torch.device("cpu"))).logp_M.sum().backward()

    update(64)  # what the first pass allocates for good
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    update(tokens)
    seconds, after = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dist.destroy_process_group()
    return (after - before) / 1024, seconds


def main(tokens: int) -> None:
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.sequence_parallel", str(tokens), str(size), f"{folder}/meet"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            ranks = [
                subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
                for rank in range(size)
            ]
            lines = [rank.communicate()[0].strip() for rank in ranks]
        print(f"{tokens} tokens over {size} ranks: {'; '.join(lines)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    if len(sys.argv) > 2:
        mebibytes, seconds = measured(int(sys.argv[4]), int(sys.argv[2]), str(Path(sys.argv[3])), count)
        print(f"{mebibytes:.0f} MiB, {seconds:.1f} s")
    else:
        main(count)
