"""Weights of a served engine are replaced completely or not at all, and later samples are from the new policy."""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import full_logprobs, make_model
from typer.testing import CliRunner

from benchmarks.architectures import small_model
from rally.chat import tiny_tokenizer
from rally.cli.serve import app
from rally.engines import EmbeddedEngine, EngineSettings
from rally.services.admission import Refused, Served
from rally.services.engine import create_app
from rally.services.http_server import ServeError
from rally.services.weight_loading import LoadRequest, WeightService
from rally.types import SamplingParams

PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_tokens=6, seed=3)


async def test_what_is_sampled_after_loading_is_the_new_policys(tmp_path: Path) -> None:
    new = make_model(seed=1)
    new.save_pretrained(tmp_path)
    engine = EmbeddedEngine(make_model(seed=0), EngineSettings(max_model_len=64, max_num_seqs=2))
    before = await engine.generate(PROMPT, PARAMS)
    for version in (0, 7):  # its initial weights were version 0 too, so that cache must not be used
        WeightService(engine).load(LoadRequest(folder=tmp_path, version=version, in_flight="keep"))
        after = await engine.generate(PROMPT, PARAMS)
        assert [span.version for span in after.spans] == [version] and after.cached_tokens == 0
        assert after.logprobs == pytest.approx(full_logprobs(new, [*PROMPT, *after.ids], len(PROMPT)), abs=1e-4)
        assert after.logprobs != before.logprobs
    await engine.close()


async def test_experts_that_are_stored_one_by_one_are_loaded(tmp_path: Path) -> None:
    """The module has all experts of a layer in one tensor."""
    new = small_model("qwen3_moe")
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.5)
    new.save_pretrained(tmp_path)
    assert any(".experts.1." in name for name in load_file(tmp_path / "model.safetensors"))
    engine = EmbeddedEngine(small_model("qwen3_moe"), EngineSettings(max_model_len=64, max_num_seqs=2))
    WeightService(engine).load(LoadRequest(folder=tmp_path, version=3, in_flight="keep"))
    after = await engine.generate(PROMPT, PARAMS)
    assert after.logprobs == pytest.approx(full_logprobs(new, [*PROMPT, *after.ids], len(PROMPT)), abs=1e-4)
    other = engine.core.model.state_dict()
    assert all(torch.equal(weight, other[name]) for name, weight in new.state_dict().items())
    make_model().save_pretrained(tmp_path)
    with pytest.raises(Refused, match="do not fit this model: it has no"):
        WeightService(engine).load(LoadRequest(folder=tmp_path, version=4, in_flight="keep"))
    await engine.close()


async def test_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    make_model(seed=1).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    engine = EmbeddedEngine(make_model(seed=0), EngineSettings(max_model_len=64, max_num_seqs=2))
    before = await engine.generate(PROMPT, PARAMS)
    name = "model.norm.weight"
    for weights, words in (
        ({}, "is missing"),
        ({n: w for n, w in whole.items() if n != name}, f"{name} is missing"),
        (whole | {"model.extra": whole[name].clone()}, "it has no model.extra"),
        (whole | {name: whole[name][:5].clone()}, rf"{name} is \(5,\) there"),
    ):
        save_file(weights, file)
        with pytest.raises(Refused, match=words):
            WeightService(engine).load(LoadRequest(folder=tmp_path, version=1, in_flight="keep"))
    for deltas in ([], [tmp_path / "delta-0-1.rally"]):  # the folder of a run on another machine
        request = LoadRequest(folder=tmp_path / "nowhere", deltas=deltas, version=1, in_flight="keep")
        with pytest.raises(
            Refused, match=r"nowhere is no folder on this machine; set rollout.checkpoint_engine.folder"
        ):
            WeightService(engine).load(request)
    with pytest.raises(Refused, match="follow 'keep' here, not 'abort'"):
        WeightService(engine).load(LoadRequest(folder=tmp_path, version=1, in_flight="abort"))
    assert engine.weight_version == 0 and (await engine.generate(PROMPT, PARAMS)).logprobs == pytest.approx(
        before.logprobs, abs=1e-5
    )
    await engine.close()


def test_a_server_takes_weights_only_from_who_knows_its_token(tmp_path: Path) -> None:
    make_model(seed=1).save_pretrained(tmp_path)
    engine = EmbeddedEngine(make_model(seed=0), EngineSettings(max_model_len=64, max_num_seqs=2))
    served = Served(engine=engine, tokenizer=tiny_tokenizer(), name="tiny")
    with pytest.raises(ServeError, match="needs a token; set RALLY_ENGINE_TOKEN"):
        create_app(served, accepts_weights=True)
    order = {"folder": str(tmp_path), "version": 1, "in_flight": "keep"}

    async def ask() -> None:
        transport = httpx.ASGITransport(create_app(served, "s3cret", accepts_weights=True))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
            for headers in ({}, {"Authorization": "Bearer guess"}):
                assert (await http.post("/load_weights", json=order, headers=headers)).status_code == 401
            assert engine.weight_version == 0
            known = {"Authorization": "Bearer s3cret"}
            for wrong in ({"version": -1}, {"version": 2**63}, {"version": True}, {"folder": 5}, {"in_flight": "x"}):
                assert (await http.post("/load_weights", json=order | wrong, headers=known)).status_code == 400, wrong
            (tmp_path / "model.safetensors.index").touch()
            (tmp_path / "zz.safetensors").write_bytes(b"not safetensors")
            spoiled = await http.post("/load_weights", json=order, headers=known)
            assert spoiled.status_code == 400 and "cannot be read" in spoiled.text
            (tmp_path / "zz.safetensors").unlink()
            assert (await http.post("/load_weights", json=order, headers=known)).status_code == 200
            assert engine.weight_version == 1
        await engine.close()

    asyncio.run(ask())


@pytest.mark.drill("security", "A local user sends weights to a served engine", "401: a token is always required")
def test_a_server_started_without_a_token_makes_and_prints_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(seed=1)
    model.resize_token_embeddings(len(tiny_tokenizer()))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.delenv("RALLY_ENGINE_TOKEN", raising=False)
    apps: list[Any] = []
    monkeypatch.setattr("uvicorn.run", lambda app, **_: apps.append(app))
    options = ["engine", str(tmp_path), "--port", "0", "--max-model-len", "64", "--max-num-seqs", "2"]
    for more, status in (([], 404), (["--accept-weights"], 401)):
        result = CliRunner().invoke(app, [*options, *more])
        assert result.exit_code == 0, result.exception
        printed = re.findall(r"RALLY_ENGINE_TOKEN=(\S+)", (result.output + capsys.readouterr().err).replace("\n", ""))
        assert len(printed) == len(more)

        async def ask(served: Any, token: str, expected: int) -> None:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://localhost") as http:
                assert (await http.post("/load_weights", json={})).status_code == expected
                if token:
                    known = {"Authorization": f"Bearer {token}"}
                    assert (await http.post("/load_weights", json={}, headers=known)).status_code == 400

        asyncio.run(ask(apps[-1], "".join(printed), status))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--image-processor=nowhere"], "the model takes no images, or there is no preprocessor_config.json"),
        (["--image-processor=nowhere", "--mm-processor-kwargs=[1]"], "is not JSON of a mapping"),
        (["--image-processor=nowhere", "--mm-processor-kwargs={"], "is not JSON of a mapping"),
    ],
)
def test_a_server_of_a_text_model_cannot_be_sent_images(tmp_path: Path, options: list[str], words: str) -> None:
    make_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    outcome = CliRunner().invoke(app, ["engine", str(tmp_path), "--port=0", *options])
    assert outcome.exit_code and words in f"{outcome.exception} {outcome.output}"
