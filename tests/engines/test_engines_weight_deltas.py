"""Weights as deltas: a server that applies them has the trainer's bytes, and one with another base refuses."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_cases import SETTINGS, change, oracle_of
from safetensors.torch import load_file, save_file
from served_cases import ServedModel
from small_models import make_model
from transformers import PreTrainedModel

from rally.engines import EngineError
from rally.engines.remote import DeltaFiles, RemoteEngine, ServerReplica, WeightFiles, weight_deltas
from rally.engines.remote.server_api import WeightChain
from rally.engines.remote.sglang_api import Sglang
from rally.engines.remote.vllm_api import Vllm
from rally.engines.remote.weight_deltas import DeltaError, apply_delta, read_delta, write_delta


def nudge(model: PreTrainedModel, scale: float = 1.01) -> None:
    """Change one weight of two, so that a delta has unchanged pieces too."""
    with torch.no_grad():
        for parameter in list(model.parameters())[::2]:
            parameter[..., :3].mul_(scale)


def equal(served: ServedModel, model: PreTrainedModel) -> bool:
    return all(torch.equal(value, served.weights[name]) for name, value in model.state_dict().items())


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    parent, shared = tmp_path / "local", tmp_path / "shared"
    parent.mkdir()
    shared.mkdir()
    yield parent, shared


async def test_servers_follow_by_deltas_and_a_late_one_by_a_full_version_and_deltas(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[WeightChain] = []
    load = ServerReplica.load

    async def recorded(self: ServerReplica, source: WeightChain, version: int, in_flight: str) -> None:
        sent.append(source)
        await load(self, source, version, in_flight)  # type: ignore[arg-type]

    monkeypatch.setattr(ServerReplica, "load", recorded)
    model = make_model(seed=0)
    transport = DeltaFiles(model.save_pretrained, *folders, full_every=3)
    with ServedModel(make_model(seed=1)).running() as one, ServedModel(make_model(seed=2)).running() as two:
        engine = RemoteEngine([one.replica()], transport, oracle_of(model), SETTINGS)
        await engine.start()
        assert (sent[-1].folder or "").endswith("full-0") and sent[-1].deltas == () and equal(one, model)
        for version in range(1, 6):
            with engine.updating():
                nudge(model)
            told = await engine.publish()
            assert told["engine/canary_difference"] < 1e-4
            assert sent[-1].folder is None and len(sent[-1].deltas) == 1, "a server that kept up gets one delta"
            assert equal(one, model)
            if version == 2:
                late = two.replica()
                await transport.send(late, "keep")
                assert (sent[-1].folder or "").endswith("full-0") and len(sent[-1].deltas) == 2
                assert equal(two, model) and late.version == 2
        await transport.send(late, "keep")  # it missed three versions
        assert sent[-1].folder is None and len(sent[-1].deltas) == 3 and equal(two, model)
        later = two.replica()
        await transport.send(later, "keep")
        assert (sent[-1].folder or "").endswith("full-3") and len(sent[-1].deltas) == 2 and equal(two, model)
        assert 0 < transport.changed_share < 0.2
        assert len(sent) == 9, "none was refused"
        kept = sorted(path.name for path in next(folders[1].iterdir()).iterdir() if path.name[0] != ".")
        assert kept == ["delta-2-3.rally", "delta-3-4.rally", "delta-4-5.rally", "full-3"]
        for server in (engine, late, later):
            await server.close()
    assert not list(folders[0].iterdir()) and not list(folders[1].iterdir())


@pytest.mark.drill(
    "reliability", "A server has other weights than the base of a delta", "It refuses; the full version is sent"
)
async def test_a_wrong_base_is_refused_and_healed(folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(seed=0)
    transport = DeltaFiles(model.save_pretrained, *folders)
    with ServedModel(make_model(seed=1)).running() as served:
        server = served.replica()
        await transport.stage(0)
        await transport.send(server, "keep")
        with torch.no_grad():
            served.weights["model.layers.1.mlp.up_proj.weight"][5, 5] += 1e-6
        nudge(model)
        await transport.stage(1)
        await transport.send(server, "keep")
        assert "gets version 1 in full" in caplog.text
        assert "up_proj.weight does not have the bytes of version 0" in caplog.text
        assert equal(served, model) and server.version == 1

        caplog.clear()
        nudge(model)
        await transport.stage(2)
        _damage(next(folders[1].glob("*/delta-1-2.rally")))
        await transport.send(server, "keep")
        assert "is damaged at" in caplog.text and equal(served, model)

        caplog.clear()
        nudge(model)
        await transport.stage(3)
        next(folders[1].glob("*/delta-2-3.rally")).unlink()
        fresh = served.replica()
        await transport.send(fresh, "keep")
        assert "is no readable delta" in caplog.text and equal(served, model)
        await server.close()
        await fresh.close()
        transport.close()


def _damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[20] ^= 0x40
    file.write_bytes(data)


async def test_a_refused_delta_leaves_the_served_weights_alone(folders: tuple[Path, Path]) -> None:
    model = make_model(seed=0)
    model.save_pretrained(folders[0] / "0")
    nudge(model)
    model.save_pretrained(folders[0] / "1")
    write_delta(folders[0] / "0", folders[0] / "1", folders[1] / "delta", 0, 1)
    with ServedModel(make_model(seed=1)).running() as served:
        before = {name: value.clone() for name, value in served.weights.items()}
        server = served.replica()
        with pytest.raises(EngineError, match="does not have the bytes of version 0"):
            await server.load(WeightChain(None, (str(folders[1] / "delta"),)), 1, "keep")
        with pytest.raises(EngineError, match="the deltas end at version 1, not 2"):
            await server.load(WeightChain(str(folders[0] / "0"), (str(folders[1] / "delta"),)), 2, "keep")
        with pytest.raises(EngineError, match="name a folder with weights"):
            await server.load(WeightChain(None, ()), 1, "keep")
        assert all(torch.equal(before[name], value) for name, value in served.weights.items())
        assert served.engine.weight_version == 0
        await server.close()


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    rows=st.integers(0, 40),
    changed=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_a_delta_restores_a_folder_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, rows: int, changed: float, seed: int
) -> None:
    home = tmp_path_factory.mktemp("delta")
    generator = torch.Generator().manual_seed(seed)
    old = {name: torch.randn(rows, 7, generator=generator).to(dtype) for name in ("a", "b")} | {"c": torch.ones(3)}
    mask = torch.rand(rows, 7, generator=generator) < changed
    new = {**old, "b": torch.where(mask, torch.randn(rows, 7, generator=generator).to(dtype), old["b"])}
    for name, weights in (("old", old), ("new", new)):
        (home / name).mkdir()
        save_file(weights, home / name / "model.safetensors", metadata={"format": "pt"})
        (home / name / "config.json").write_text("{}")
    size, weight_deltas.PIECE = weight_deltas.PIECE, 64  # several pieces a weight
    try:
        write_delta(home / "old", home / "new", home / "delta", 3, 4)
        apply_delta(home / "old", read_delta(home / "delta"), home / "applied")
        with pytest.raises(DeltaError, match="does not have the bytes of version 3") if mask.any() else nullcontext():
            apply_delta(home / "new", read_delta(home / "delta"), home / "wrong")
    finally:
        weight_deltas.PIECE = size
    for file in ("model.safetensors", "config.json"):
        assert (home / "applied" / file).read_bytes() == (home / "new" / file).read_bytes()
    assert load_file(home / "applied" / "model.safetensors").keys() == new.keys()
    shutil.rmtree(home)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 40, b"[]" + (2).to_bytes(8, "little"), b"\xff" * 9])
def test_a_file_that_is_no_delta_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "delta").write_bytes(content)
    with pytest.raises(DeltaError, match="is no readable delta"):
        read_delta(tmp_path / "delta")


def test_other_servers_get_whole_models(tmp_path: Path) -> None:
    for api in (Vllm(), Sglang()):
        with pytest.raises(
            EngineError, match=r"cannot apply weight deltas; use rollout\.checkpoint_engine\.backend=files"
        ):
            api.load(WeightChain(None, ("d",)), 1, "keep")
        assert api.load(WeightChain("/models/full-1", ()), 1, "keep") == api.load("/models/full-1", 1, "keep")


async def test_the_transport_by_files_is_unchanged(tmp_path: Path) -> None:
    model = make_model(seed=0)
    transport = WeightFiles(model.save_pretrained, tmp_path)
    for version in range(2):
        await transport.stage(version)
        change(model)
    assert [path.name for path in tmp_path.glob("*/[0-9]*")] == ["1"]
    transport.close()
