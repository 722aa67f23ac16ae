"""Every failure of a server has one defined outcome, and only complete responses are used."""

import asyncio
import gc
import os
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_server import FakeServer

from rally.engines import EngineError
from rally.engines.base import ReplicaBusy, ReplicaGone, SampleVoid
from rally.engines.remote import ClientSettings, Launch, ServerApi, ServerReplica, Sglang, Vllm
from rally.engines.remote.launched_server import probe_package
from rally.engines.remote.server_api import GenerationRequest, checked_generation
from rally.engines.router.router import Router
from rally.types import SamplingParams, WeightSpan

DIALECTS: dict[str, ServerApi] = {"vllm": Vllm(), "sglang": Sglang()}
PARAMS = SamplingParams(max_tokens=5, seed=3)


@pytest.fixture(params=DIALECTS)
async def fake(request: pytest.FixtureRequest) -> AsyncIterator[FakeServer]:
    async with FakeServer(request.param) as server:
        yield server


async def replica_of(fake: FakeServer, version: int = 7, timeout: float = 5.0) -> ServerReplica:
    settings = ClientSettings(timeout=timeout, vocabulary=97, max_model_len=64)
    replica = ServerReplica(fake.url, DIALECTS[fake.dialect], settings)
    await replica.load("nowhere", version, "keep")
    return replica


async def test_ids_logprobs_and_versions_come_back(fake: FakeServer) -> None:
    replica = await replica_of(fake)
    generation = await replica.generate([1, 2, 3], PARAMS)
    assert generation.ids == (22, 58, 19, 37, 66)
    assert generation.logprobs == (-1.5,) * 5
    assert (generation.finish, generation.cached_tokens) == ("length", 3)
    assert generation.spans == (WeightSpan(7, 0, 5),)
    assert generation.queued_seconds == (0.25 if fake.dialect == "sglang" else 0), "vLLM does not say"
    stopped = await replica.generate([1, 2, 3], SamplingParams(max_tokens=5, stop_ids=(58,)))
    assert (stopped.ids, stopped.finish) == ((22, 58), "stop")
    await replica.close()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("500", r"failed at .* \(500\): .*as told"),
        ("502", r"failed at .* \(502\)"),
        ("cut", "cannot be reached"),
        ("hang up", "cannot be reached"),
        ("not json", "not JSON"),
        ("no logprobs", "no log-probabilities"),
        ("few logprobs", "log-probabilities"),
        ("nan", "not a finite number"),
        ("too many", "log-probabilities|6 tokens, more than max_tokens=5"),
        ("text", "no list of token ids"),
        ("other prompt", "read 4 tokens of a prompt of 3"),
        ("odd end", "unknown finish reason 'error'"),
        ("foreign weights", "'default', which is not one of this run"),
        ("gap", "do not cover"),
        ("no answer", "has no "),
    ],
)
async def test_an_answer_that_is_not_whole_is_a_server_that_is_gone(fake: FakeServer, fault: str, words: str) -> None:
    replica = await replica_of(fake)
    fake.faults.append(fault)
    with pytest.raises(ReplicaGone, match=words) as caught:
        await replica.generate([1, 2, 3], PARAMS)
    assert fake.url in str(caught.value)
    assert len((await replica.generate([1, 2, 3], PARAMS)).ids) == 5  # a bad response does not affect the next one
    await replica.close()


async def test_a_token_outside_the_vocabulary_is_not_used(fake: FakeServer) -> None:
    """Training would read beyond its logits."""
    replica = await replica_of(fake)
    replica.settings = replace(replica.settings, vocabulary=66)
    with pytest.raises(ReplicaGone, match="sampled token 66, which is outside the model's vocabulary of 66"):
        await replica.generate([1, 2, 3], PARAMS)
    await replica.close()


@pytest.mark.parametrize("status", ["429", "503"])
async def test_a_busy_server_says_when_to_come_back(fake: FakeServer, status: str) -> None:
    replica = await replica_of(fake)
    fake.faults.append(status)
    with pytest.raises(ReplicaBusy) as caught:
        await replica.generate([1, 2, 3], PARAMS)
    assert caught.value.retry_after == 0.25
    await replica.close()


@pytest.mark.parametrize("status", ["400", "403", "404", "422"])
async def test_a_request_that_no_server_would_take_is_the_callers_mistake(fake: FakeServer, status: str) -> None:
    replica = await replica_of(fake)
    fake.faults.append(status)
    with pytest.raises(EngineError, match="as told") as caught:
        await replica.generate([1, 2, 3], PARAMS)
    assert not isinstance(caught.value, (ReplicaGone, ReplicaBusy))
    await replica.close()


async def test_what_would_hurt_a_server_is_not_sent(fake: FakeServer) -> None:
    replica = await replica_of(fake)
    sent = len(fake.log)
    for prompt, params, words in [
        ([], PARAMS, "empty prompt"),
        ([1, 97], PARAMS, "vocabulary of 97"),
        ([1] * 60, PARAMS, "max_model_len=64"),
        ([1], SamplingParams(stop=("x",)), "stop strings need a tokenizer"),
    ]:
        with pytest.raises(EngineError, match=words):
            await replica.generate(prompt, params)
    assert len(fake.log) == sent
    await replica.close()


async def test_a_slow_loris_is_left_at_the_deadline(fake: FakeServer) -> None:
    replica = await replica_of(fake, timeout=0.4)
    fake.faults.append("drip")
    with pytest.raises(ReplicaGone, match=r"within 0\.4 s"):
        await replica.generate([1, 2, 3], PARAMS)
    await replica.close()


async def test_nobody_home_is_a_server_that_is_gone() -> None:
    replica = ServerReplica("http://127.0.0.1:9", Vllm())
    replica.version, replica.serving = 0, True
    with pytest.raises(ReplicaGone, match="cannot be reached"):
        await replica.generate([1], PARAMS)
    assert not await replica.healthy()
    await replica.close()


def test_connections_of_a_loop_that_is_closed_do_not_pile_up() -> None:
    home = asyncio.new_event_loop()
    thread = threading.Thread(target=home.run_forever, daemon=True)
    thread.start()
    fake = FakeServer("vllm")
    asyncio.run_coroutine_threadsafe(fake.__aenter__(), home).result()
    replica = ServerReplica(fake.url, Vllm())
    asyncio.run(replica.load("nowhere", 7, "keep"))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(12):
        assert asyncio.run(replica.healthy())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before + 12
    asyncio.run(replica.close())
    asyncio.run_coroutine_threadsafe(fake.__aexit__(), home).result()
    home.call_soon_threadsafe(home.stop)
    thread.join()
    home.close()


def test_a_missing_client_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(EngineError, match=r"need aiohttp; run: pip install 'rally-rl\[servers\]'"):
        ServerReplica("http://127.0.0.1:9", Vllm())


async def test_cancelling_frees_the_request_on_the_server(fake: FakeServer) -> None:
    replica = await replica_of(fake)
    problems: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    fake.pace = 0.05
    task = asyncio.create_task(replica.generate([1, 2, 3], SamplingParams(max_tokens=60)))
    while not any(path.endswith("generate") for path, _ in fake.log):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await replica.close()  # waits until the abort is sent
    asked = next(body for path, body in fake.log if path == "/generate") if fake.dialect == "sglang" else None
    while not fake.gone_callers:
        await asyncio.sleep(0.01)
    assert asked is None or fake.aborted == [asked["rid"]]
    del replica, task
    gc.collect()
    assert not problems, "connections were left open"


async def test_connections_are_found_again_and_bounded(fake: FakeServer) -> None:
    settings = ClientSettings(vocabulary=97, max_model_len=64, max_connections=20)
    replica = ServerReplica(fake.url, DIALECTS[fake.dialect], settings)
    await replica.load("nowhere", 7, "keep")
    fake.pace = 0.01
    for _ in range(3):
        generations = await asyncio.gather(*(replica.generate([n + 1], PARAMS) for n in range(60)))
        assert {len(generation.ids) for generation in generations} == {5}
    assert fake.connections == 20
    fake.faults.extend(["hang up"] * 5)
    outcomes = await asyncio.gather(*(replica.generate([1], PARAMS) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(outcome, ReplicaGone) for outcome in outcomes) == 5
    assert len((await replica.generate([1], PARAMS)).ids) == 5
    await replica.close()


async def test_nothing_else_waits_behind_generations(fake: FakeServer) -> None:
    settings = ClientSettings(vocabulary=97, max_model_len=64, max_connections=1)
    replica = ServerReplica(fake.url, DIALECTS[fake.dialect], settings)
    await replica.load("nowhere", 7, "keep")
    fake.pace = 0.1
    long = [asyncio.create_task(replica.generate([1], SamplingParams(max_tokens=60))) for _ in range(2)]
    await asyncio.sleep(0.1)
    async with asyncio.timeout(2):
        assert await replica.healthy()
        await replica.load("nowhere", 8, "keep")
    assert sum(path.endswith("generate") for path, _ in fake.log) == 1
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    await replica.close()


async def test_one_replica_serves_several_event_loops(fake: FakeServer) -> None:
    replica = await replica_of(fake)

    def elsewhere() -> int:
        return asyncio.run(_count(replica))

    assert [await asyncio.to_thread(elsewhere) for _ in range(2)] == [5, 5]
    assert len((await replica.generate([1], PARAMS)).ids) == 5
    await replica.close()


async def _count(replica: ServerReplica) -> int:
    return len((await replica.generate([1, 2, 3], PARAMS)).ids)


async def test_a_server_without_the_current_weights_takes_no_requests(fake: FakeServer) -> None:
    replica = await replica_of(fake)
    assert await replica.healthy()
    fake.refuses_weights = True
    with pytest.raises(ReplicaGone, match="out of memory"):
        await replica.load("nowhere", 8, "abort")
    asked = [path for path, _ in fake.log]
    with pytest.raises(ReplicaGone, match="does not have the current weights"):
        await replica.generate([1], PARAMS)
    assert [path for path, _ in fake.log] == asked
    assert asked[-1] in ("/resume", "/continue_generation")  # the server is not left paused
    assert not await replica.healthy()
    await replica.close()


async def test_an_update_in_mid_request_is_told_token_by_token(fake: FakeServer) -> None:
    replica = await replica_of(fake)
    fake.pace = 0.02
    task = asyncio.create_task(replica.generate([1, 2, 3], SamplingParams(max_tokens=20)))
    await asyncio.sleep(0.15)
    await replica.load("nowhere", 8, "keep")
    spans = (await task).spans
    assert [span.version for span in spans] == [7, 8]
    assert spans[0].end == spans[1].start > 0 and spans[1].end == 20
    await replica.close()


async def test_where_a_server_does_not_tell_all_tokens_count_as_of_the_oldest_version(fake: FakeServer) -> None:
    fake.reports_spans = False
    replica = await replica_of(fake)
    assert (await replica.generate([1], PARAMS)).spans == (WeightSpan(7, 0, 5),)
    fake.pace = 0.02
    task = asyncio.create_task(replica.generate([1, 2, 3], SamplingParams(max_tokens=20)))
    await asyncio.sleep(0.15)
    await replica.load("nowhere", 8, "keep")
    assert (await task).spans == (WeightSpan(7, 0, 20),), "a repetition would favour short responses"
    task = asyncio.create_task(replica.generate([1, 2, 3], SamplingParams(max_tokens=20)))
    await asyncio.sleep(0.05)
    replica.version = None  # a load failed, and nobody knows what it samples from
    with pytest.raises(SampleVoid, match="failed to load weights while it sampled"):
        await task
    await replica.close()


def test_a_request_that_waited_during_an_update_may_have_used_older_prefixes() -> None:
    request = GenerationRequest(id="a", prompt_ids=(1,), params=PARAMS, before=7, after=8, salt="s")
    reported = [{"version": "8", "start": 0, "end": 3}, {"version": "9", "start": 3, "end": 4}]

    def spans(**more: bool) -> list[tuple[int, int, int]]:
        got = checked_generation(request, [1, 2, 3, 4], [-1.0] * 4, "stop", spans=reported, **more).spans
        return [(span.version, span.start, span.end) for span in got]

    assert spans(salted=True) == [(7, 0, 1), (8, 1, 3), (9, 3, 4)]
    assert spans() == [(8, 0, 3), (9, 3, 4)], "Rally's own server finds prefixes by version"


async def test_vllm_is_asked_for_its_last_word_alone() -> None:
    async with FakeServer("vllm") as fake:
        replica = await replica_of(fake)
        await replica.generate([1, 2, 3], PARAMS)
        await replica.close()
    (asked,) = [body["sampling_params"] for path, body in fake.log if path == "/inference/v1/generate"]
    assert asked["output_kind"] == 2, "with 0 vLLM makes an output of all tokens so far at every token"


def test_a_script_that_sets_variables_can_stand_for_a_python(tmp_path: Path) -> None:
    (tmp_path / "only_there").mkdir()
    (tmp_path / "only_there" / "__init__.py").write_text("")
    script = tmp_path / "python.sh"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    assert probe_package(str(script), "only_there", "print(root.name)") == "only_there"
    with pytest.raises(EngineError, match="does not have only_there"):
        probe_package(sys.executable, "only_there")


@pytest.mark.parametrize(
    ("name", "in_flight", "paused", "flushed"),
    [
        ("vllm", "abort", "/pause?mode=abort", "/reset_prefix_cache"),
        ("vllm", "keep", "/pause?mode=keep&clear_cache=false", None),
        ("vllm", "recompute", "/pause?mode=keep&clear_cache=false", "/reset_prefix_cache?reset_running_requests=true"),
        ("sglang", "abort", {"mode": "abort"}, True),
        ("sglang", "keep", {"mode": "in_place"}, False),
        ("sglang", "recompute", {"mode": "retract"}, True),
    ],
)
def test_requests_in_flight_are_treated_as_asked(name: str, in_flight: str, paused: object, flushed: object) -> None:
    first, *rest = DIALECTS[name].load("there", 3, in_flight)  # type: ignore[arg-type]
    assert paused in (first.path, first.body)
    if name == "vllm":
        assert [c.path for c in rest if "cache" in c.path] == ([flushed] if flushed else [])
    else:
        (update,) = rest
        assert update.body is not None and update.body["flush_cache"] is flushed


async def test_cached_prefixes_belong_to_one_load_of_weights(fake: FakeServer) -> None:
    first_run, second_run = await replica_of(fake), await replica_of(fake)
    for replica in (first_run, first_run, second_run):  # both call their weights version 7
        await replica.generate([1], PARAMS)
    await second_run.load("elsewhere", 7, "keep")
    await second_run.generate([1], PARAMS)
    bodies = [body for path, body in fake.log if path.endswith("generate")]
    one, again, other, reloaded = (body.get("cache_salt", body.get("extra_key")) for body in bodies)
    assert one == again and len({one, other, reloaded}) == 3
    for replica in (first_run, second_run):
        await replica.close()


def test_options_become_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("vllm_api", "sglang_api"):
        monkeypatch.setattr(f"rally.engines.remote.{module}.probe_package", lambda *_: "True")
    plan = {
        "python": "py",
        "folder": "model",
        "port": 31000,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "memory_share": 0.4,
    }
    extra = {"swap_space": 2, "enable_lora": True, "async_scheduling": False, "kv": {"a": 1}}
    words = Vllm().command(Launch(**plan, raw_logprobs=False, extra=extra))
    assert [words[0], *words[2:5]] == ["py", "vllm.entrypoints.cli.main", "serve", "model"]
    assert Path(words[1]).name == "rally_server_launcher.py"
    told = " ".join(words)
    for part in ("--port 31000", "--logprobs-mode processed_logprobs", "--enable-scale-out", "--swap-space 2"):
        assert part in told
    assert "--no-async-scheduling" in words and '{"a": 1}' in words and "--enforce-eager" not in words
    assert "--api-server-count" not in words and "--no-enable-chunked-prefill" not in words
    told = " ".join(Vllm().command(Launch(**plan, on_cpu=True, extra={})))
    assert "--no-enable-chunked-prefill" in told and "--max-num-batched-tokens 512" in told, "a prompt is read at once"
    assert "--api-server-count 3" in " ".join(Vllm().command(Launch(**plan, frontends=3, extra={})))
    told = " ".join(Sglang().command(Launch(**plan, tensor_parallel=2, extra={"attention_backend": "triton"})))
    for part in ("--model-path model", "--tp-size 2", "--mem-fraction-static 0.4", "--attention-backend triton"):
        assert part in told
    for dialect, flag in ((Vllm(), "--enable-sleep-mode"), (Sglang(), "--enable-memory-saver")):
        assert flag in dialect.command(Launch(**plan, sleeps=True, extra={}))
        assert flag not in dialect.command(Launch(**plan, extra={}))
    shared = Vllm().command(Launch(**plan, by_handles=True, extra={}))
    assert shared[shared.index("--weight-transfer-config") + 1] == '{"backend": "ipc"}'
    with pytest.raises(EngineError, match="can only be switched on"):
        Sglang().command(Launch(**plan, extra={"disable_radix_cache": False}))


def test_a_python_without_the_engine_is_told_how_to_get_it() -> None:
    plan = Launch(
        python="/nowhere/python",
        folder="",
        port=1,
        dtype="float32",
        max_model_len=1,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        memory_share=0.5,
        extra={},
    )
    with pytest.raises(EngineError, match=r"rollout\.server\.python=/nowhere/python cannot be run"):
        Vllm().command(plan)
    import sys

    from rally.engines.remote.launched_server import probe_package

    with pytest.raises(EngineError, match=r"does not have surely_absent; install it .*rollout\.server\.python=DIR"):
        probe_package(sys.executable, "surely_absent")


def test_a_server_that_cannot_give_back_memory_is_told_so_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(python: str, package: str, question: str = "") -> str:
        if package == "torch_memory_saver":
            raise EngineError("it is not there")
        return ""

    monkeypatch.setattr("rally.engines.remote.sglang_api.probe_package", ask)
    plan = {"python": "py", "folder": "", "port": 1, "dtype": "float32", "max_model_len": 1, "max_num_seqs": 1}
    with pytest.raises(EngineError, match=r"which py lacks; install it .* or set rollout\.free_cache_engine"):
        Sglang().command(Launch(**plan, max_num_batched_tokens=1, memory_share=0.5, sleeps=True, extra={}))


async def test_conversations_keep_their_server_and_leave_it_when_it_fails() -> None:
    async with FakeServer("vllm") as one, FakeServer("vllm") as two:
        router = Router([await replica_of(one), await replica_of(two)], max_model_len=64)
        for _ in range(3):
            await router.generate([1, 2], PARAMS, session="a")
        assert sorted(_asked(server) for server in (one, two)) == [0, 3]
        home = one if _asked(one) == 3 else two
        home.faults.extend(["429", "500"])
        assert len((await router.generate([1, 2], PARAMS, session="a")).ids) == 5
        assert (_asked(one) + _asked(two), _asked(home)) == (6, 5)  # busy, then failed, then the other server
        await router.close()


def _asked(server: FakeServer) -> int:
    return sum(path == "/inference/v1/generate" for path, _ in server.log)
