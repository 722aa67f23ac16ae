"""Weights by broadcast: all servers of a group get the same bits at once, and a failure leaves no server with a mixture
of versions."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from remote_cases import SETTINGS, oracle_of
from served_cases import TOKEN, EngineProcess, ServedModel
from small_models import make_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rally.engines import EngineError
from rally.engines.embedded.engine import WeightsLost
from rally.engines.remote import BroadcastWeights, RemoteEngine, ServerReplica, StagedWeights, WeightFiles
from rally.engines.remote import weight_broadcast as module
from rally.engines.remote.inside import rally_weight_group as group_module
from rally.engines.remote.inside.rally_weight_group import (
    GroupError,
    GroupInvitation,
    TensorForm,
    WeightGroup,
    WeightWorker,
    buckets_of,
    received,
)
from rally.engines.remote.rally_api import Rally
from rally.engines.remote.server_api import WeightBroadcast
from rally.services.admission import Refused
from rally.services.weight_loading import BroadcastRequest, JoinRequest, WeightService
from rally.types import SamplingParams
from rally.util.rendezvous import host_store

CPU = torch.device("cpu")
PARAMS = SamplingParams(max_tokens=6, seed=3)
BUCKET = 4096  # bytes, so that there are several


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the servers of these tests are threads, which share variables


def transport_of(model: PreTrainedModel, folder: Path, seconds: float = 20) -> BroadcastWeights:
    staged = StagedWeights(CPU, BUCKET)

    def write(target: Path) -> None:
        twin = make_model(seed=9)
        twin.load_state_dict(staged.weights())
        twin.save_pretrained(target)

    files = WeightFiles(write, folder)
    return BroadcastWeights(model.state_dict, staged, files, writes_later=lambda: True, seconds=seconds)


def change(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def equal(served: ServedModel, model: PreTrainedModel) -> bool:
    return all(torch.equal(value, served.weights[name]) for name, value in model.state_dict().items())


def files_of(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("rally-weights-*/[0-9]*")]


async def test_all_servers_get_a_version_together_and_one_that_misses_it_gets_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(seed=0)
    transport = transport_of(model, tmp_path)
    with ServedModel(make_model(seed=1)).running() as one, ServedModel(make_model(seed=2)).running() as two:
        servers = [one.replica(), two.replica()]
        engine = RemoteEngine(servers, transport, oracle_of(model), SETTINGS)
        await engine.start()
        assert files_of(tmp_path) == ["0"] and transport.sent == 0, "servers start from files"
        for version in (1, 2):
            with engine.updating():
                change(model)
            told = await engine.publish()
            assert told["engine/canary_difference"] < 1e-4
            assert equal(one, model) and equal(two, model) and transport.sent == version
        assert files_of(tmp_path) == ["0"] and not caplog.text
        assert transport._group is not None
        name = transport._group.name
        await transport.send(servers[1], "keep")  # as after its restart
        with engine.updating():
            change(model)
        await engine.publish()
        assert transport.sent == 3 and transport._group.name != name and equal(two, model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        change(model)  # in asynchronous training the policy changes while a server starts
        late = ServerReplica(two.url, Rally(), token=TOKEN)
        await transport.send(late, "keep")
        assert files_of(tmp_path) == ["3"] and late.version == 3
        assert all(torch.equal(value, two.weights[name]) for name, value in before.items())
        await late.close()
        await engine.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.drill("reliability", "A server of a broadcast dies", "The next broadcast goes to the others")
async def test_a_dead_server_is_left_out_of_the_next_group(home: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(home / "model").float().eval()
    processes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RALLY_ENGINE_TOKEN", TOKEN)
        processes = [EngineProcess(home / "model", "--accept-weights", "--dtype", "float32") for _ in range(2)]
    try:
        for process in processes:
            process.wait_ready()
        staged = StagedWeights(CPU, BUCKET)
        files = WeightFiles(model.save_pretrained, tmp_path)
        transport = BroadcastWeights(model.state_dict, staged, files, writes_later=lambda: True)
        replicas = [ServerReplica(process.url, Rally(), token=TOKEN) for process in processes]
        vocabulary = model.config.vocab_size
        oracle = replace(oracle_of(model), vocabulary=vocabulary)
        engine = RemoteEngine(replicas, transport, oracle, SETTINGS)
        await engine.start()
        for broken in (False, True):
            if broken:
                processes[1].kill()
                with pytest.raises(httpx.TransportError):  # it may end a little later than what started it
                    while True:
                        httpx.get(f"{processes[1].url}/health")
            with engine.updating():
                change(model)
            told = await engine.publish()
            assert told["engine/canary_difference"] < 1e-4 and told["engine/servers"] == 2 - broken
        assert transport.sent == 2, "the second one reached the server that is left"
        await engine.close()
    finally:
        for process in processes:
            process.kill()


@pytest.mark.drill(
    "reliability",
    "A broadcast of weights breaks off",
    "The server answers nothing until it has a whole version",
)
async def test_a_server_whose_broadcast_broke_off_answers_nothing_until_it_has_a_whole_version(tmp_path: Path) -> None:
    new = make_model(seed=1)
    new.save_pretrained(tmp_path)
    with ServedModel(make_model(seed=0)).running() as served, ThreadPoolExecutor() as threads:
        server = served.replica()
        store, place = host_store("127.0.0.1")
        invitation = GroupInvitation(place=place, backend="gloo", name="g", rank=0, size=2, secret="s", seconds=20)
        mine = asyncio.wrap_future(threads.submit(WeightGroup, invitation, CPU, store))
        joined = vars(replace(invitation, rank=1))
        await server.call(module.HttpCall("/join_weights", joined), 20)
        group = await mine
        forms = tuple(TensorForm.of(name, weight) for name, weight in new.state_dict().items())
        running = asyncio.create_task(served.engine.generate([1, 2, 3], replace(PARAMS, max_tokens=60)))
        await asyncio.sleep(0)
        load = asyncio.create_task(server.load(WeightBroadcast("g", forms, BUCKET), 1, "keep"))
        first = next(buckets_of(forms, BUCKET))
        await asyncio.to_thread(group.broadcast, torch.zeros(first.bytes, dtype=torch.uint8))
        group.close()
        with pytest.raises(EngineError, match="a broadcast of weights failed"):
            await load
        with pytest.raises(WeightsLost):
            await running
        with pytest.raises(EngineError, match="a broadcast of weights failed"):
            await server.call(module.HttpCall("/generate", {"prompt_ids": [1, 2, 3]}), 20)
        with pytest.raises(WeightsLost):
            await served.engine.prompt_logprobs([1, 2, 3], 1)
        with pytest.raises(EngineError, match="cannot sample"):
            await server.call(module.HttpCall("/health"), 20)
        with pytest.raises(EngineError, match="is not in the group 'g'; join it first"):
            await server.load(WeightBroadcast("g", forms, BUCKET), 1, "keep")
        with pytest.raises(EngineError, match=r"lm_head.weight is \(1, 1\) there|do not fit this model"):
            await server.load(WeightBroadcast("g", (("lm_head.weight", "float32", (1, 1)),), BUCKET), 1, "keep")
        await server.load(str(tmp_path), 2, "keep")
        assert equal(served, new) and len((await server.generate([1, 2, 3], PARAMS)).ids) == 6
        await server.close()


async def test_nobody_waits_for_a_server_that_fails_during_a_broadcast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(seed=0)
    transport = transport_of(model, tmp_path, seconds=3600)
    with ServedModel(make_model(seed=1)).running() as one, ServedModel(make_model(seed=2)).running() as two:
        engine = RemoteEngine([one.replica(), two.replica()], transport, oracle_of(model), SETTINGS)
        await engine.start()
        load = WeightService._load_broadcast

        def failing(self: WeightService, request: BroadcastRequest, version: int) -> None:
            if self._engine is two.engine:
                self._leave()
                raise Refused(500, "no")
            load(self, request, version)

        with engine.updating():
            change(model)
        with monkeypatch.context() as patch:
            patch.setattr(WeightService, "_load_broadcast", failing)
            await engine.publish()
        assert equal(one, model) and equal(two, model) and transport.sent == 0
        assert "as files this time, because a broadcast failed" in caplog.text
        with engine.updating():
            change(model)
        await engine.publish()
        assert equal(one, model) and equal(two, model) and transport.sent == 1
        await engine.close()


async def test_nobody_waits_for_a_server_that_refuses_to_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The servers that joined do not either, so that they can load files at once."""
    model = make_model(seed=0)
    transport = transport_of(model, tmp_path, seconds=3600)
    with ServedModel(make_model(seed=1)).running() as one, ServedModel(make_model(seed=2)).running() as two:
        engine = RemoteEngine([one.replica(), two.replica()], transport, oracle_of(model), SETTINGS)
        await engine.start()
        join = WeightService.join

        def refusing(self: WeightService, request: JoinRequest) -> None:
            if self._engine is two.engine:
                raise Refused(500, "no")
            join(self, request)

        monkeypatch.setattr(WeightService, "join", refusing)
        with engine.updating():
            change(model)
        await engine.publish()
        assert equal(one, model) and equal(two, model) and transport.sent == 0
        assert "as files this time, because a broadcast failed" in caplog.text and "no" in caplog.text
        await engine.close()


@pytest.mark.parametrize("trainer_hangs", [True, False])
async def test_a_group_that_hangs_while_it_forms_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trainer_hangs: bool
) -> None:
    """As in NCCL, which waits without end for a process that dies while it connects: the trainer sends files, and the
    server can load them."""
    model, hanging = make_model(seed=0), threading.Event()
    transport = transport_of(model, tmp_path, seconds=0.5)
    with ServedModel(make_model(seed=1)).running() as served:
        engine = RemoteEngine([served.replica()], transport, oracle_of(model), SETTINGS)
        await engine.start()

        def never(backend: str, device: torch.device, store: object, rank: int, *rest: object) -> object:
            if trainer_hangs == (rank > 0):
                raise RuntimeError("this process dies")
            hanging.wait()
            raise RuntimeError("too late")

        monkeypatch.setattr(group_module, "peer_group", never)
        with engine.updating():
            change(model)
        await engine.publish()
        assert equal(served, model) and transport.sent == 0
        assert ("this process dies" if trainer_hangs else "did not form within 1 s") in caplog.text
        hanging.set()
        await engine.close()


async def test_a_server_that_is_given_up_leaves_the_files_to_the_others(tmp_path: Path) -> None:
    """Files that are being written for it are not written by a second thread at once, nor while weights are staged."""
    weights, writers, most = {"w": torch.zeros(8)}, 0, 0
    staged = StagedWeights(CPU, BUCKET)
    written: list[list[float]] = []

    def write(target: Path) -> None:
        nonlocal writers, most
        writers, most = writers + 1, max(most, writers + 1)
        before = staged.weights()["w"].tolist()
        time.sleep(0.2)
        written.append([*before, *staged.weights()["w"].tolist()])
        target.mkdir()
        writers -= 1

    transport = BroadcastWeights(lambda: weights, staged, WeightFiles(write, tmp_path), writes_later=lambda: True)
    await transport.stage(1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(transport.folder(), 0.05)
    assert Path(await transport.folder()).name == "1" and most == 1
    weights["w"] += 1
    await transport.stage(2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(transport.folder(), 0.05)
    weights["w"] += 1
    await transport.stage(3)
    assert Path(await transport.folder()).name == "3" and most == 1
    assert written == [[float(number)] * 16 for number in range(3)], "no file mixes two versions"
    transport.close()


def no_port(address: str) -> None:
    raise OSError(f"no port is free on {address}")


async def test_after_three_failures_files_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(seed=0)
    transport = transport_of(model, tmp_path, seconds=1)
    with ServedModel(make_model(seed=1)).running() as served:
        engine = RemoteEngine([served.replica()], transport, oracle_of(model), SETTINGS)
        await engine.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "host_store", no_port)
            for version in range(1, 5):
                with engine.updating():
                    change(model)
                await engine.publish()
                assert equal(served, model) and transport.version == version
        assert caplog.text.count("as files this time") == 2 and caplog.text.count("as files from now on") == 1
        assert transport.sent == 0 and "no port is free" in caplog.text
        await engine.close()


@pytest.mark.parametrize(
    ("urls", "host"),
    [(["http://127.0.0.1:1", "http://10.0.0.7:2", "http://n3:4"], "10.0.0.7"), (["http://[::1]:1"], "::1")],
)
def test_the_trainer_is_met_at_an_address_that_all_servers_reach(urls: list[str], host: str) -> None:
    assert module.meeting_host(urls) == host


@pytest.fixture
def pair() -> Iterator[tuple[WeightGroup, WeightGroup]]:
    store, place = host_store("127.0.0.1")
    one = GroupInvitation(place=place, backend="gloo", name="pair", rank=0, size=2, secret="s", seconds=20)
    with ThreadPoolExecutor() as threads:
        other = threads.submit(WeightGroup, replace(one, rank=1), CPU)
        groups = WeightGroup(one, CPU, store), other.result()
    yield groups
    for group in groups:
        group.close()


def test_a_worker_of_vllm_receives_in_its_own_place(pair: tuple[WeightGroup, WeightGroup]) -> None:
    """As vLLM calls it, with the module read by its path. The real one is in `tests/runs/test_runs_vllm.py`."""
    loaded: dict[str, Tensor] = {}

    class Worker(WeightWorker):
        rank, device = 1, CPU  # the second of two workers of this server

        def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:  # type: ignore[override]
            loaded.update({name: weight.clone() for name, weight in weights_iterator})

    worker = Worker()
    worker._rally_group = pair[1]
    staged = StagedWeights(CPU, BUCKET, untied=True)
    weight = torch.randn(30, 40)
    staged.copy({"embedding": weight, "head": weight})
    words = {"group": "pair", "weights": staged.forms, "bucket_bytes": BUCKET}
    with ThreadPoolExecutor() as threads:
        sent = threads.submit(staged.send, pair[0])
        worker.rally_receive_weights(json.dumps(words))
        sent.result()
    assert loaded.keys() == {"embedding", "head"} and all(torch.equal(one, weight) for one in loaded.values())
    with pytest.raises(GroupError, match="not in the group"):
        worker.rally_receive_weights(json.dumps(words | {"group": "other"}))
    words = {
        "place": "127.0.0.1:1",
        "name": "n",
        "backend": "other",
        "rank": 3,
        "size": 5,
        "secret": "s",
        "seconds": 0.1,
    }
    seen: list[GroupInvitation] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "WeightGroup", lambda invitation, device: seen.append(invitation))
        worker.rally_join_weights(json.dumps(words))
    assert seen[0].rank == 4 and "secret" not in repr(seen[0])


def test_weights_of_any_type_and_size_arrive_as_they_are(pair: tuple[WeightGroup, WeightGroup]) -> None:
    generator = torch.Generator().manual_seed(0)

    @given(
        sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6),
        dtypes=st.lists(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]), min_size=6, max_size=6
        ),
    )
    def arrive(sizes: list[tuple[int, int]], dtypes: list[torch.dtype]) -> None:
        weights: dict[str, Tensor] = {
            str(n): (100 * torch.randn(size, generator=generator)).to(dtype)
            for n, (size, dtype) in enumerate(zip(sizes, dtypes, strict=False))
        }
        weights["tied"], weights["scalar"] = weights["0"], torch.tensor(3.5)
        staged = StagedWeights(CPU, BUCKET)
        staged.copy(weights)
        assert [form.name for form in staged.forms].count("tied") == 0 or not weights["0"].numel()
        with ThreadPoolExecutor() as threads:
            sent = threads.submit(staged.send, pair[0])
            arrived = {name: weight.clone() for name, weight in received(pair[1], staged.forms, BUCKET)}
            sent.result()
        arrived["tied"] = arrived["0"]
        assert all(torch.equal(arrived[name], weight) for name, weight in weights.items())
        assert all(torch.equal(staged.weights()[name], weight) for name, weight in weights.items())

    arrive()
