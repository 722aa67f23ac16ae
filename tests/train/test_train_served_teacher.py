"""A served teacher gives the loss of the same teacher in process; a server that fails ends the run with a sentence."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from train_cases import KeepingPolicy, Paper, assert_equal, calm_model, run_config, uneven_episodes, write_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from rally.algos.distillation import DistillationSettings
from rally.chat.tiny_tokenizer import tiny_tokenizer
from rally.config import ConfigError
from rally.distributed.message_encoding import decode, encode
from rally.engines import EmbeddedEngine, EngineError, EngineSettings
from rally.engines.base import ReplicaGone
from rally.engines.remote.prompt_logprobs import PROTOCOLS, PromptClientSettings, PromptLogprobsClient, PromptQuery
from rally.runs.train import train
from rally.services.admission import Served
from rally.services.engine import create_app
from rally.track import RunFolder
from rally.train.batch import build_batch
from rally.train.micro_batches import MicroBatches, MicroBatchShare
from rally.train.reference import FrozenModel
from rally.train.teacher import ServedTeacher, TeacherError, Teachers
from rally.train.update import UpdateSettings, update_policy


class ServerThread:
    """The real engine server on a free port."""

    def __init__(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        engine = EmbeddedEngine(model, EngineSettings(max_model_len=128), num_pages=64)  # type: ignore[arg-type]
        app = create_app(Served(engine=engine, tokenizer=tokenizer or tiny_tokenizer(), name="teacher"))
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


def client(url: str, **changes: Any) -> PromptLogprobsClient:
    known: dict[str, Any] = {"url": url, "kind": "rally", "model": "teacher", "retry_seconds": 0.01}
    return PromptLogprobsClient(PromptClientSettings(**{**known, **changes}))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ServerThread(calm_model(seed=7)) as url:
        yield url


@pytest.mark.parametrize("mode", ["k3", "forward_kl_topk"])
def test_the_gradient_is_that_of_the_same_teacher_in_process(address: str, mode: str) -> None:
    chosen = DistillationSettings(mode=mode, topk=5, with_rewards=False)
    settings = UpdateSettings(mini_batch_groups=100, distillation=chosen, temperature=0.8, max_tokens=60)
    size, kept = calm_model().config.vocab_size, []
    for teacher in (FrozenModel(calm_model(seed=7)), ServedTeacher(client(address))):
        policy, teachers = KeepingPolicy(calm_model()), Teachers({"default": teacher}, chosen, size)
        batch = teachers.answered(build_batch(uneven_episodes()))
        message = decode(encode(MicroBatches([MicroBatchShare(batch.rows)])))  # the answers also reach other ranks
        assert isinstance(message, MicroBatches)
        update_policy(policy, replace(batch, rows=message.shares[0].rows), settings, teachers=teachers)
        kept.append(policy.kept[0])
    assert_equal(kept[0], kept[1], 2e-6)


async def test_prompt_logprobs_are_those_of_the_plain_forward(address: str) -> None:
    ids = [3, 9, 4, 1, 5, 9, 2]
    [found] = await client(address).score([PromptQuery(ids, 3, 4)])
    model = AutoModelForCausalLM.from_config(calm_model(seed=7).config)
    model.load_state_dict(calm_model(seed=7).state_dict())
    logp = torch.log_softmax(model(torch.tensor([ids])).logits[0].detach(), -1)[2:-1]
    assert found.logprobs == pytest.approx([float(logp[i, t]) for i, t in enumerate(ids[3:])], abs=1e-5)
    assert found.top_ids == logp.topk(4).indices.tolist()
    bounds = {
        "start=0 of 7": PromptQuery(ids, 0, 4),
        "start=7 of 7": PromptQuery(ids, 7, 4),
        "likeliest tokens; ask for 0 to": PromptQuery(ids, 1, 257),
        "more than max_model_len=128": PromptQuery([1] * 129, 1, 0),
    }
    for message, query in bounds.items():
        with pytest.raises(EngineError, match=f"rejected /prompt_logprobs .400.*{message}"):
            await client(address).score([query])


async def test_the_server_is_checked_before_it_is_used(address: str) -> None:
    await client(address).check(128, 5)
    with pytest.raises(EngineError, match="takes 128 tokens, and the run has histories of up to 129"):
        await client(address).check(129, 5)
    known = await client(address).vocabulary()
    assert known is not None and known.ids == tiny_tokenizer().get_vocab()
    with pytest.raises(EngineError, match="serves teacher and not Qwen/Qwen3-8B"):
        await client(address, kind="vllm", model="Qwen/Qwen3-8B").check(100, 5)


def test_a_server_that_is_gone_or_silent_is_an_error_with_its_address(address: str) -> None:
    settings = DistillationSettings(mode="k3")
    batch = build_batch(uneven_episodes())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        waiting = Teachers({"a": ServedTeacher(client(url, timeout=0.1, tries=1))}, settings, 64)
        with pytest.raises(TeacherError, match=f"{url} did not answer /prompt_logprobs within 0.1 s"):
            waiting.answered(batch)
    gone = Teachers({"a": ServedTeacher(client(url))}, settings, 64)
    with pytest.raises(TeacherError, match=f"the served teacher cannot be used: {url} cannot be reached"):
        gone.answered(batch)
    small = Teachers({"a": ServedTeacher(client(address))}, replace(settings, mode="forward_kl_topk", topk=30), 8)
    with pytest.raises(TeacherError, match=r"token id .* among its 8 likeliest, and the policy has 8 ids"):
        small.answered(batch)


VLLM = {
    "choices": [
        {
            "prompt_logprobs": [
                None,
                {
                    "7": {"logprob": -3.5, "rank": 9},
                    "4": {"logprob": -0.5, "rank": 1},
                    "2": {"logprob": -1.0, "rank": 2},
                },
                {"4": {"logprob": -0.25, "rank": 1}, "8": {"logprob": -2.0, "rank": 2}},
            ]
        }
    ]
}
SGLANG = {
    "meta_info": {
        "input_token_logprobs": [[None, 5, None], [-3.5, 7, None], [-0.25, 4, None]],
        "input_top_logprobs": [None, [[-0.5, 4, None], [-1.0, 2, None]], [[-0.25, 4, None], [-2.0, 8, None]]],
    }
}


@pytest.mark.parametrize(("kind", "answer"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_the_answers_of_other_servers_are_read_by_token_and_rank(kind: Any, answer: Any) -> None:
    protocol = PROTOCOLS[kind]
    found = protocol.read(answer, PromptQuery((5, 7, 4), 1, 2))
    assert found == ([-3.5, -0.25], [[4, 2], [4, 8]], [[-0.5, -1.0], [-0.25, -2.0]])
    assert protocol.read(answer, PromptQuery((5, 7, 4), 2, 0)).logprobs == [-0.25]
    with pytest.raises(ReplicaGone):
        protocol.read(answer, PromptQuery((5, 6, 4), 1, 2))  # of another token than was asked for


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("teacher"), seed=5)


def words(teacher: Path, url: str | None, **loss: object) -> list[str]:
    name = "distillation.teacher_models.teacher_model"
    served = [f"{name}.server.url={url}", f"{name}.inference.name=rally"] if url else []
    keys = ["distillation.enabled=True", f"{name}.model_path={teacher}", *served]
    return [*keys, *(f"distillation.distillation_loss.{name}={value}" for name, value in loss.items())]


def test_a_run_with_a_served_teacher_equals_one_with_the_teacher_in_process(
    home: Path, teacher: Path, tmp_path: Path, paper: Paper
) -> None:
    metrics = []
    with ServerThread(AutoModelForCausalLM.from_pretrained(teacher)) as url:
        for name, at in (("here", None), ("served", url)):
            keys = words(teacher, at, loss_mode="forward_kl_topk", topk=8)
            train(run_config(home, tmp_path / name, *keys, "trainer.total_training_steps=1"), paper.console)
            [row] = [row.metrics for row in RunFolder(tmp_path / name).read_metrics() if row.step]
            metrics.append(row)
    for name in ("distillation/loss", "distillation/teacher_mass", "distillation/overlap_ratio", "actor/grad_norm"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-4) != 0
    assert metrics[1]["timing_s/teacher"] > 0

    more = tiny_tokenizer()
    token = next(iter(more.get_vocab()))
    renamed = {("other" if name == token else name): number for name, number in more.get_vocab().items()}
    more.get_vocab = lambda: renamed  # type: ignore[method-assign]
    with (
        ServerThread(AutoModelForCausalLM.from_pretrained(teacher), more) as url,
        pytest.raises(TeacherError, match=rf"at {url}: the token .* in the policy and none here"),
    ):
        train(run_config(home, tmp_path / "wrong", *words(teacher, url)), paper.console)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mode": "jsd_full"}, "needs the teacher's whole distribution, which no server returns"),
        ({"loss_mode": "forward_kl_topk", "topk": 300}, "returns at most 256 tokens"),
    ],
)
def test_what_a_server_cannot_give_is_refused(
    home: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(home, tmp_path, *words(Path("t"), "http://127.0.0.1:1", **changes))
    unnamed = [word for word in words(Path("t"), "http://127.0.0.1:1") if "inference.name" not in word]
    with pytest.raises(ConfigError, match="one of rally, vllm, sglang; it is None"):
        run_config(home, tmp_path, *unnamed)


async def test_a_cancelled_request_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []
    monkeypatch.setattr("rally.engines.embedded.engine.prompt_logprobs", lambda *args: computed.append(args))
    engine = EmbeddedEngine(calm_model(seed=7), EngineSettings(max_model_len=64), num_pages=16)
    with engine._lock:
        task = asyncio.create_task(engine.prompt_logprobs([1, 2, 3], 1))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await engine.close()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert not computed
