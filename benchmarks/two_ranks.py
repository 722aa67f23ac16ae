"""Two ranks of one machine, which may share its only GPU: are their results those of one process, and how long do they
take?

    python -m benchmarks.two_ranks [--tiny] [--backend nccl|gloo] [--parts update ipc ...] [--module-layers]

Each part runs in two fresh processes and is limited in time. A part that fails prints its traceback, the others go on,
and the exit code is 1. Sharing a GPU by NCCL needs NCCL 2.30 (docs/cluster.md).
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import json
import math
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from transformers import PreTrainedConfig, PreTrainedModel

from benchmarks.train_step import build, shapes, through_the_module
from rally.chat import tiny_tokenizer
from rally.data import write_rows
from rally.distributed.process_group import ProcessGroup, RankLayout, Rendezvous
from rally.distributed.worker import Executor, Worker
from rally.engines.remote.weight_updates import IpcHandles
from rally.models import attention
from rally.models.load import pick_device
from rally.models.sharding import ALONE, Message, Ranks, copy_gathered, local_tensor
from rally.platforms import CUDA, SHARED_VARIABLE, named_platform
from rally.recipes.arithmetic import data as arithmetic
from rally.train.batch import TrainBatch
from rally.train.offload import ON_DEVICE, OffloadSettings
from rally.train.packing import Row
from rally.train.policy import OptimizerSettings, Policy
from rally.train.rank_messages import PublishWeights
from rally.train.update import UpdateSettings, update_policy

UPDATES = 3  # the first one compiles kernels and connects the ranks; the others are timed
LR = 1e-5
LARGEST = 1e-5  # difference of weights in float32; a wrong gradient changes weights by up to 2 * LR in each update
BUCKET = 256 << 20
ULYSSES = RankLayout(sequence_size=2)


@dataclass(frozen=True)
class Options:
    tiny: bool
    device: str
    layers: int
    timeout: float
    module_layers: bool


class Line(NamedTuple):
    """A line of the table. `right`: whether what was compared is as it must be; None: nothing was compared."""

    part: str
    what: str
    result: str
    right: bool | None = None


@dataclass
class Rank:
    """One of the two processes of a part. Rank 0 adds the lines."""

    number: int
    folder: Path
    options: Options
    lines: list[Line] = field(default_factory=list)
    part: str = ""
    joined: ProcessGroup | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self.options.device)

    def group(self) -> ProcessGroup:
        if self.joined is None:
            place = Rendezvous(place=str(self.folder / "rendezvous"), secret="two ranks", local_rank=self.number)
            self.joined = ProcessGroup(self.number, 2, place, self.device.type, self.options.timeout)
        return self.joined

    def ranks(self, layout: RankLayout | None = None) -> Worker:
        kind = Worker if self.number else First
        return kind(self.group(), layout=layout)

    def line(self, what: str, result: str, right: bool | None = None) -> None:
        if self.number == 0:
            self.lines.append(Line(self.part, what, result, right))
            print(f"{self.part}: {what}: {result}", flush=True)

    def everywhere(self, right: bool) -> bool:
        """Whether it is so on both ranks."""
        return all(bool(one) for one in self.group().all_gather(torch.tensor([float(right)])))


class First(Worker):
    """Rank 0. It sends messages, as a controller does."""

    @contextmanager
    def broadcast(self, message: Message) -> Iterator[None]:
        self._group.send(message)
        with super().broadcast(message):
            yield


class CopyingEngine:
    """What a rank's engine does with published weights."""

    def __init__(self, target: PreTrainedModel) -> None:
        self.target = target

    def copy_weights(self, policy: PreTrainedModel) -> None:
        copy_gathered(policy, self.target, trained_only=False)


# ---- models, rows and updates


def small_config() -> PreTrainedConfig:
    return shapes(tiny=True)["tiny"]


def config_of(options: Options) -> PreTrainedConfig:
    if options.tiny:
        return small_config()
    config = shapes(tiny=False)["1.5B"]
    config.num_hidden_layers = options.layers
    config.layer_types = config.layer_types[: options.layers]
    return config


def rows_of(vocabulary: int, prompts: int, answers: int, prompt: int, answer: int) -> list[Row]:
    """Answers to shared prompts, with the log-probabilities that a model with random weights has."""
    rng, rows = random.Random(0), []
    for group in range(prompts):
        asked = [random.Random(group).randrange(vocabulary) for _ in range(prompt)]
        for _ in range(answers):
            length = rng.randint(answer // 2, answer)
            ids = [*asked, *(rng.randrange(vocabulary) for _ in range(length))]
            number = len(rows)
            row = Row(
                ids=ids,
                sampled=range(prompt, prompt + length),
                logprobs=[-math.log(vocabulary)] * length,
                episode=number,
                advantages=[1.0 if number % 2 else -1.0] * length,
            )
            rows.append(row)
    return rows


@dataclass(frozen=True)
class Work:
    """What is updated, and with how many tokens."""

    config: PreTrainedConfig
    dtype: torch.dtype
    rows: list[Row]
    answers: int
    max_tokens: int

    @property
    def batch(self) -> TrainBatch:
        return TrainBatch(
            rows=self.rows,
            rewards_N=torch.tensor([row.advantages[0] for row in self.rows], dtype=torch.float64),
            groups_N=torch.arange(len(self.rows)) // self.answers,
            tokens_N=torch.tensor([len(row.sampled) for row in self.rows]),
        )

    @property
    def settings(self) -> UpdateSettings:
        return UpdateSettings(mini_batch_groups=len(self.rows) // self.answers, max_tokens=self.max_tokens)


def small_work() -> Work:
    config = small_config()
    return Work(config, torch.float32, rows_of(config.vocab_size, 4, 4, 12, 24), 4, 128)


def large_work(options: Options) -> Work:
    if options.tiny:
        return replace(small_work(), dtype=torch.bfloat16)
    config = config_of(options)
    return Work(config, torch.bfloat16, rows_of(config.vocab_size, 8, 8, 256, 512), 8, 16384)


def policy_of(
    work: Work,
    device: torch.device,
    ranks: Ranks,
    offload: OffloadSettings = ON_DEVICE,
    *,
    offload_policy: bool = False,
    deterministic: bool = False,
) -> Policy:
    model = build(work.config, device, work.dtype)
    attention.install(model)
    ranks.shard(model, offload=offload_policy)
    policy = Policy(
        model, OptimizerSettings(lr=LR), 100, gradient_checkpointing=True, offload=offload, deterministic=deterministic
    )
    policy.rest()
    return policy


class Updated(NamedTuple):
    seconds: float  # of one update
    metrics: list[dict[str, float]]  # rank 0 has them


def update(rank: Rank, policy: Policy, work: Work, count: int = UPDATES) -> Updated:
    """Updates by one process or both ranks; each timed one ends when the device is idle."""
    metrics, times = [], []
    executor = Executor(policy, work.settings)
    for step in range(count):
        began = now(rank.device)
        if rank.number == 0:
            metrics.append(update_policy(policy, work.batch, work.settings, step=step))
        else:
            executor.execute(rank.group().receive())
        times.append(now(rank.device) - began)
    return Updated(sum(times[1:]) / max(1, count - 1), metrics)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def free(rank: Rank) -> None:
    import gc

    gc.collect()
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()


def whole_weights(policy: Policy) -> dict[str, Tensor]:
    """In main memory, on both ranks."""
    from rally.models.sharding import gathered

    with torch.no_grad():
        return {name: value.detach().cpu().clone() for name, value in gathered(policy.model.named_parameters())}


def numel(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def size_of(model: PreTrainedModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


# ---- the parts


def update_part(rank: Rank, layout: RankLayout | None = None) -> None:
    """Two ranks make the update of one process: in float32 to rounding, in bfloat16 as far as its rounding allows."""
    compare_small(rank, small_work(), layout)
    compare_large(rank, large_work(rank.options), layout)


def compare_small(rank: Rank, work: Work, layout: RankLayout | None) -> None:
    start: dict[str, Tensor] = {}
    alone: dict[str, Tensor] = {}
    metrics: list[dict[str, float]] = []
    if rank.number == 0:
        policy = policy_of(work, rank.device, ALONE)
        start = whole_weights(policy)
        metrics = update(rank, policy, work).metrics
        alone = whole_weights(policy)
    policy = policy_of(work, rank.device, rank.ranks(layout))
    both = update(rank, policy, work)
    weights = whole_weights(policy)
    if rank.number == 0:
        largest = max(float((weights[name] - alone[name]).abs().max()) for name in alone)
        moved = max(float((alone[name] - start[name]).abs().max()) for name in alone)
        rank.line(
            "float32, largest difference of weights",
            f"{largest:.1e} (they moved by up to {moved:.1e})",
            moved > LARGEST and largest < LARGEST,
        )
        difference = max(relative(one, two) for one, two in zip(metrics, both.metrics, strict=True))
        rank.line("float32, largest relative difference of metrics", f"{difference:.1e}", difference < 1e-3)


def relative(one: dict[str, float], two: dict[str, float]) -> float:
    """The largest difference of the policy's metrics, relative to those that are not close to 0 themselves."""
    return max(abs(one[key] - two[key]) / max(abs(one[key]), 1e-2) for key in one if key.startswith("actor/"))


def compare_large(rank: Rank, work: Work, layout: RankLayout | None) -> None:
    alone = Updated(math.nan, [])
    if rank.number == 0:
        policy = policy_of(work, rank.device, ALONE)
        alone = update(rank, policy, work)
        rank.line("update of one process", f"{alone.seconds:.2f} s, {numel(policy.model) / 1e9:.2f}B parameters")
        del policy
    free(rank)
    policy = policy_of(work, rank.device, rank.ranks(layout))
    both = update(rank, policy, work)
    rank.line("update of two ranks", f"{both.seconds:.2f} s, {peak(rank.device)}")
    if rank.number == 0:
        key = "actor/grad_norm"
        norms = [[one[key] for one in told.metrics] for told in (alone, both)]
        worst = max(abs(a - b) / a for a, b in zip(*norms, strict=True))
        told = " ".join(f"{a:.4g}/{b:.4g}" for a, b in zip(*norms, strict=True))
        rank.line("bfloat16, gradient norms of one/two", told, worst < 0.05)


def peak(device: torch.device) -> str:
    return f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB each" if device.type == "cuda" else "on the CPU"


def gather_part(rank: Rank) -> None:
    """Weights are published from the shards into a whole copy on each rank, in buckets."""
    work = large_work(rank.options)
    target, expected = (build(work.config, rank.device, work.dtype) for _ in range(2))
    policy = policy_of(work, rank.device, rank.ranks())
    executor = Executor(policy, work.settings)
    executor.engine = CopyingEngine(target)  # type: ignore[assignment]
    own = dict(expected.named_parameters())
    shards = all(is_shard(part, own[name], rank.number) for name, part in policy.model.named_parameters())
    times = []
    for version in range(3):
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
        began = now(rank.device)
        if rank.number == 0:
            with policy.ranks.broadcast(PublishWeights(version)):
                CopyingEngine(target).copy_weights(policy.model)
        else:
            executor.execute(rank.group().receive())
        times.append(now(rank.device) - began)
    equal = all(torch.equal(value, own[name]) for name, value in target.named_parameters())
    right, seconds = rank.everywhere(equal and shards), min(times[1:])
    size = size_of(target)
    rank.line(
        "published from the shards", f"{seconds:.3f} s, {size / 1e9 / seconds:.1f} GB/s, same bits: {right}", right
    )
    rank.line("the first time", f"{times[0]:.2f} s")


def is_shard(part: Tensor, whole: Tensor, number: int) -> bool:
    """Whether a rank's part is that of the whole tensor."""
    rows = torch.chunk(whole, 2)
    own = local_tensor(part.detach())
    return torch.equal(own, rows[number]) if number < len(rows) else own.numel() == 0


def ipc_part(rank: Rank) -> None:
    """Handles as they are sent to vLLM and to SGLang are opened by another process of the same GPU."""
    if rank.device.type != "cuda":
        rank.line("CUDA IPC", "needs a GPU")
        return
    group = rank.group()
    if rank.number == 0:
        model = build(config_of(rank.options), rank.device, torch.bfloat16)
        began = time.perf_counter()
        handles = IpcHandles(dict(model.named_parameters()))
        (rank.folder / "vllm").write_text(json.dumps(handles.for_vllm()), encoding="utf-8")
        (rank.folder / "sglang").write_text(handles.for_sglang(), encoding="utf-8")
        made = time.perf_counter() - began
        expected = {name: checksum(weight) for name, weight in handles.weights.items()}
        torch.cuda.synchronize()
    group.all_gather(torch.ones(1))
    if rank.number:
        for kind, opened in (("vllm", opened_by_vllm), ("sglang", opened_by_sglang)):
            began = now(rank.device)
            weights = {name: weight.clone() for name, weight in opened((rank.folder / kind).read_text())}
            seconds = now(rank.device) - began
            found = {name: checksum(weight) for name, weight in weights.items()}
            group.report(kind, json.dumps({"seconds": seconds, "sums": found}))
        return
    for kind in ("vllm", "sglang"):
        told = json.loads(group.reports(kind)[0])
        size = sum(weight.numel() * weight.element_size() for weight in handles.weights.values())
        same, seconds = told["sums"] == expected, told["seconds"]
        speed = f"{size / 1e9 / seconds:.1f} GB/s"
        rank.line(f"CUDA IPC, handles for {kind}", f"{seconds:.3f} s, {speed}, same checksums: {same}", same)
    rank.line("both forms of handles made", f"{made:.3f} s")


def opened_by_vllm(text: str) -> list[tuple[str, Tensor]]:
    """As vLLM opens them: each handle belongs to a GPU, and is rebuilt on the process's own number of it."""
    told = json.loads(text)
    gpu = str(torch.cuda.get_device_properties(0).uuid)
    handles = pickle.loads(base64.b64decode(told["ipc_handles_pickled"]))
    found = []
    for name, handle in zip(told["names"], handles, strict=True):
        arguments = list(handle[gpu])
        arguments[6] = 0
        found.append((name, rebuild_cuda_tensor(*arguments)))
    return found


def opened_by_sglang(text: str) -> list[tuple[str, Tensor]]:
    opened: list[tuple[str, Tensor]] = pickle.loads(base64.b64decode(text))
    return opened


def checksum(tensor: Tensor) -> int:
    """Of the bits, with their places."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    words = tensor.detach().contiguous().view(-1).view(width).long()
    return int((words * (2 * torch.arange(len(words), device=words.device) + 1)).sum())


def broadcast_part(rank: Rank) -> None:
    """Rank 0 broadcasts a whole model in buckets to a process that has none of it."""
    model = build(config_of(rank.options), rank.device, torch.bfloat16)
    expected = {name: checksum(weight) for name, weight in model.named_parameters()}
    if rank.number:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    rank.group()
    times = []
    for _ in range(3):
        began = now(rank.device)
        broadcast(model, rank.number)
        times.append(now(rank.device) - began)
    found = {name: checksum(weight) for name, weight in model.named_parameters()}
    same, seconds = rank.everywhere(found == expected), min(times[1:])
    speed = f"{size_of(model) / 1e9 / seconds:.1f} GB/s"
    rank.line("broadcast in buckets of 256 MiB", f"{seconds:.3f} s, {speed}, same checksums: {same}", same)
    rank.line("the first time", f"{times[0]:.2f} s")


@torch.no_grad()
def broadcast(model: PreTrainedModel, number: int) -> None:
    bucket: list[Tensor] = []
    parameters = [parameter.detach() for parameter in model.parameters()]
    for parameter in [*parameters, None]:
        full = sum(one.nbytes for one in bucket) + (0 if parameter is None else parameter.nbytes) > BUCKET
        if bucket and (parameter is None or full):
            flat = torch.cat([one.flatten() for one in bucket])
            dist.broadcast(flat, 0)
            if number:
                for one, values in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                    one.copy_(values.view_as(one))
            bucket = []
        if parameter is not None:
            bucket.append(parameter)


EVERYTHING = OffloadSettings(optimizer=True, params=True, activations=True)
OFFLOADS: dict[str, tuple[OffloadSettings, bool]] = {
    "nothing offloaded": (ON_DEVICE, False),
    "nothing offloaded, again": (ON_DEVICE, False),
    "optimizer_offload": (OffloadSettings(optimizer=True), False),
    "optimizer, param and activation offload": (EVERYTHING, False),
    "offload_policy": (ON_DEVICE, True),
}


def offload_part(rank: Rank) -> None:
    """Offloading changes no bit. AdamW on the CPU, which offload_policy uses, rounds in another way than a GPU's."""
    ranks, work = rank.ranks(), large_work(rank.options)
    first: dict[str, Tensor] = {}
    repeats = True
    for name, (offload, offload_policy) in OFFLOADS.items():
        policy = policy_of(work, rank.device, ranks, offload, offload_policy=offload_policy, deterministic=True)
        told = update(rank, policy, work, 2)
        own = {key: local_tensor(value.detach()).cpu().clone() for key, value in policy.model.named_parameters()}
        first = first or own
        equal = rank.everywhere(all(torch.equal(own[key], first[key]) for key in first))
        largest = max(float((own[key].float() - first[key].float()).abs().max()) for key in first if own[key].numel())
        if name == "nothing offloaded, again":
            repeats = equal
        exact = repeats and not (offload_policy and rank.device.type == "cuda")
        result = f"{told.seconds:.2f} s, {peak(rank.device)}, same bits: {equal} (largest difference {largest:.1e})"
        rank.line(name, result, equal if exact else largest < 1e-3)
        del policy, own
        free(rank)
        if rank.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
    if not repeats:
        rank.line("the update itself", "does not repeat to the bit, so bits were not compared", False)


def training(options: Options, seconds: float) -> list[Line]:
    """`rally train` with two ranks and an engine in each: rollout, update and publishing, by the normal command."""
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder))
        keys = [
            *(f"data.train_files={folder}/train.parquet", "data.train_batch_size=4", "data.max_prompt_length=64"),
            *("data.max_response_length=32", f"{ROLLOUT}.n=4", f"{ROLLOUT}.gpu_memory_utilization=0.05"),
            *(f"actor_rollout_ref.model.path={folder}/model", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
            *(f"custom_reward_function.path={folder}/reward.py", "reward.num_workers=1"),
            *(f"trainer.default_local_dir={folder}/run", "trainer.total_training_steps=2", "trainer.save_freq=1"),
            *("trainer.n_gpus_per_node=2", f"trainer.device={options.device}", "trainer.val_before_train=false"),
        ]
        began = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "rally.cli", "train", *keys], capture_output=True, text=True, timeout=seconds
            )
            output, right = done.stdout + done.stderr, done.returncode == 0
        except subprocess.TimeoutExpired as problem:
            output, right = f"{problem.stdout!r}\n{problem.stderr!r}", False
        if not right:
            logs = [log.read_text(errors="replace")[-3000:] for log in Path(folder).rglob("rank-*.log")]
            print("\n".join([output[-6000:], *logs]), file=sys.stderr, flush=True)
        return [Line("train", "rally train, two steps of a tiny model", f"{time.monotonic() - began:.0f} s", right)]


ROLLOUT = "actor_rollout_ref.rollout"
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 7 / 7"
)


def write_run(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = small_config()
    config.update({"vocab_size": len(tokenizer), "num_attention_heads": 2, **special})
    model = build(config, torch.device("cpu"), torch.float32)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    easy = arithmetic.ArithmeticSpec(a=(1, 9), b=(1, 9), c=(1, 9), forms=("{a}+{b}*{c}",))
    write_rows(arithmetic.rows(8, 0, "train", easy), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


TRAIN = "train"
PARTS: dict[str, Callable[[Rank], None]] = {
    "update": update_part,
    "gather": gather_part,
    "ipc": ipc_part,
    "broadcast": broadcast_part,
    "offload": offload_part,
    "ulysses": partial(update_part, layout=ULYSSES),
}


# ---- processes


def run_rank(part: str, number: int, folder: str, options: Options, result: Connection) -> None:
    """A process of a part."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    rank = Rank(number, Path(folder), options, part=part)
    if options.device == "cuda":
        torch.cuda.set_device(0)
    try:
        with through_the_module() if options.module_layers else nullcontext():
            PARTS[part](rank)
        result.send(rank.lines)
    except BaseException:  # noqa: BLE001 the other parts go on
        print(f"--- {part}, rank {number}", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        result.send([*rank.lines, Line(part, f"rank {number}", "failed, see its traceback", False)])
        os._exit(1)
    if rank.joined is not None:
        rank.joined.all_gather(torch.ones(1))  # nobody leaves while the other one works
    os._exit(0)  # destroying communicators of NCCL takes time and can hang


def run_part(part: str, options: Options, seconds: float) -> list[Line]:
    """Both processes of a part. They are killed when one of them fails, or after some seconds."""
    if part == TRAIN:
        return training(options, seconds)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.train_step", "rally.distributed.worker"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        ranks = [
            context.Process(target=run_rank, args=(part, number, folder, options, pipes[number][1]), daemon=True)
            for number in range(2)
        ]
        for rank in ranks:
            rank.start()
        for _, ours in pipes:
            ours.close()  # so that a rank that ends without a word is noticed
        lines, problem = received([mine for mine, _ in pipes], time.monotonic() + seconds)
        if not problem:
            for rank in ranks:
                rank.join(10)
        for rank in ranks:
            rank.kill()
            rank.join()
        return [*lines, *([Line(part, "the part", problem, False)] if problem else [])]


def received(pipes: list[Connection], deadline: float) -> tuple[list[Line], str]:
    """The lines of both ranks, and why there are no more."""
    lines: list[Line] = []
    waiting = list(pipes)
    while waiting:
        ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            return lines, "took too long and was ended"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            waiting.remove(pipe)
            try:
                told = pipe.recv()
            except EOFError:
                return lines, "a rank ended without a word"
            lines += told
            if any("failed, see" in line.result for line in told):
                return lines, "ended after the failure"
    return lines, ""


def versions(options: Options) -> str:
    library: Any = None
    number = ctypes.c_int()
    if options.device == "cuda":
        library = ctypes.CDLL("libnccl.so.2")  # the one that is loaded already
        library.ncclGetVersion(ctypes.byref(number))
    nccl = "" if library is None else f", NCCL {number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return f"torch {torch.__version__}{nccl}, {os.environ.get(SHARED_VARIABLE) or 'a GPU for each rank'}"


def table(lines: list[Line]) -> Table:
    made = Table("part", "what", "result", "", title="two ranks")
    for line in lines:
        mark = "" if line.right is None else "ok" if line.right else "WRONG"
        made.add_row(line.part, line.what, line.result, mark)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_ranks", description="Two ranks against one process."
    )
    parser.add_argument("--tiny", action="store_true", help="a small shape: a minute, on a CPU too")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="of ranks that share a GPU")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, TRAIN], default=[*PARTS, TRAIN])
    parser.add_argument("--layers", type=int, help="of the large shape: 28, with gloo 4")
    parser.add_argument("--module-layers", action="store_true", help="train without fused layers, to compare with")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--part-seconds", type=float, default=60.0, help="limit of a part")
    parser.add_argument("--seconds", type=float, default=170.0, help="limit of all parts together")
    chosen = parser.parse_args()
    end = time.monotonic() + chosen.seconds
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    device = pick_device(chosen.device).type
    if device == "cuda" and named_platform("cuda").device_count() < 2:
        os.environ[SHARED_VARIABLE] = CUDA.backend if chosen.backend == "nccl" else chosen.backend
    layers = chosen.layers or (28 if chosen.backend == "nccl" else 4)
    options = Options(chosen.tiny, device, layers, chosen.part_seconds, chosen.module_layers)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as caches:
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"):
            os.environ.setdefault(name, f"{caches}/{name}")
        for part in chosen.parts:
            left = min(chosen.part_seconds, end - time.monotonic())
            began = time.monotonic()
            lines += run_part(part, options, left) if left > 0 else [Line(part, "the part", "no time left", False)]
            print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    print(versions(options))
    Console(width=150).print(table(lines))
    sys.exit(any(line.right is False for line in lines))


if __name__ == "__main__":
    main()
