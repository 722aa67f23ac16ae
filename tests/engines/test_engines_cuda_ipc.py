"""Weights by CUDA IPC: a server that accepts handles needs no files, and one that does not gets files and a warning.
The tensor itself stands in for the GPU handle here."""

import logging
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_server import FakeServer
from remote_cases import SETTINGS, change, oracle_of
from small_models import make_model

from rally.engines import EngineError
from rally.engines.remote import CudaIpcWeights, RemoteEngine, ServerReplica, Sglang, Vllm, WeightFiles, weight_updates
from rally.engines.remote.canary import canary
from rally.engines.remote.weight_updates import IpcHandles

DIALECTS = {"vllm": Vllm, "sglang": Sglang}


@pytest.fixture(autouse=True)
def tensors_for_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_updates, "reduce_tensor", lambda tensor: (None, (tensor,)))
    monkeypatch.setattr(weight_updates, "_gpu", lambda tensor: "gpu")
    monkeypatch.setattr(weight_updates, "ForkingPickler", pickle.Pickler)


def _raise(*_: object) -> None:
    raise RuntimeError("this memory cannot be shared")


def test_a_memory_that_has_two_names_is_sent_once() -> None:
    weight = torch.arange(6.0)
    sent = IpcHandles({"embedding": weight.view(2, 3), "head": weight.view(2, 3), "norm": torch.ones(3)})
    told = sent.for_vllm()
    assert (told["names"], told["dtype_names"], told["shapes"]) == (
        ["embedding", "norm"],
        ["float32", "float32"],
        [[2, 3], [3]],
    )


@pytest.mark.parametrize("name", DIALECTS)
async def test_no_part_of_a_sleeping_server_is_woken_twice(name: str, tmp_path: Path) -> None:
    model = make_model(seed=0)
    async with FakeServer(name, make_model(seed=1)) as fake:
        server = ServerReplica(fake.url, DIALECTS[name]())
        transport = CudaIpcWeights(model.state_dict, WeightFiles(model.save_pretrained, tmp_path))
        engine = RemoteEngine([server], transport, oracle_of(model), replace(SETTINGS, sleeps=True))
        await engine.start()
        await engine.rest()
        fake.handles = "refused"  # after its weight memory was allocated again
        with engine.updating():
            change(model)
        assert (await engine.publish())["engine/servers"] == 1
        await engine.rest()
        fake.refuses_weights = True
        with pytest.raises(EngineError, match="out of memory"):
            await engine.publish()
        assert fake.asleep == {"kv_cache"}
        await server.sleep()  # as far as it can
        fake.refuses_weights = False
        assert (await engine.publish())["engine/servers"] == 1 and not fake.asleep
        await engine.close()


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("taken", ["taken", "refused", "garbled", "not to be had"])
async def test_weights_arrive_by_handles_or_else_by_files(
    name: str, taken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if taken == "not to be had":
        monkeypatch.setattr(IpcHandles, "__init__", _raise)
    model = make_model(seed=0)
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        model.save_pretrained(folder)

    async with FakeServer(name, make_model(seed=1), handles=taken) as fake:
        transport = CudaIpcWeights(model.state_dict, WeightFiles(write, tmp_path))
        engine = RemoteEngine([ServerReplica(fake.url, DIALECTS[name]())], transport, oracle_of(model), SETTINGS)
        with caplog.at_level(logging.WARNING):
            await engine.start()
            for _ in range(2):
                with engine.updating():
                    change(model)
                told = await engine.publish()
                assert told["engine/canary_difference"] < 1e-4 and fake.label == str(engine.weight_version)
        asked = [path for path, _ in fake.log if "weights_from_tensor" in path or path == "/update_weights"]
        # files: the model is written for each version; handles: only to start a server
        tried = 0 if taken == "not to be had" else 1
        assert (len(asked), len(written)) == ((3, 1) if taken == "taken" else (tried, 3))
        assert ["because CUDA IPC failed" in text for text in caplog.messages] == [True] * (taken != "taken")
        await engine.close()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_server_that_dies_of_handles_is_given_files_when_it_is_back(name: str, tmp_path: Path) -> None:
    model = make_model(seed=0)
    transport = CudaIpcWeights(model.state_dict, WeightFiles(model.save_pretrained, tmp_path))
    await transport.stage(1)
    async with FakeServer(name, make_model(seed=1), handles="fatal") as fake:
        server = ServerReplica(fake.url, DIALECTS[name]())
        with pytest.raises(EngineError):
            await transport.send(server, "keep")
        await transport.send(server, "keep")  # after a restart
        assert await canary(server, oracle_of(model)) < 1e-4
        asked = [path for path, _ in fake.log if "weights_from_tensor" in path or path == "/update_weights"]
        assert len(asked) == 1, "it would have died again"
        await server.close()
    transport.close()
