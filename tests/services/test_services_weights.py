"""Weights of a served engine are replaced completely or not at all, and later samples are from the new policy."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from small_models import full_logprobs, make_model

from rally.engines import EmbeddedEngine, EngineSettings
from rally.services.admission import Refused
from rally.services.engine import LoadRequest, load_weights
from rally.types import SamplingParams

PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_tokens=6, seed=3)


async def test_what_is_sampled_after_loading_is_the_new_policys(tmp_path: Path) -> None:
    new = make_model(seed=1)
    new.save_pretrained(tmp_path)
    engine = EmbeddedEngine(make_model(seed=0), EngineSettings(max_model_len=64, max_num_seqs=2))
    before = await engine.generate(PROMPT, PARAMS)
    for version in (0, 7):  # its initial weights were version 0 too, so that cache must not be used
        load_weights(engine, LoadRequest(folder=tmp_path, version=version, in_flight="keep"))
        after = await engine.generate(PROMPT, PARAMS)
        assert [span.version for span in after.spans] == [version] and after.cached_tokens == 0
        assert after.logprobs == pytest.approx(full_logprobs(new, [*PROMPT, *after.ids], len(PROMPT)), abs=1e-4)
        assert after.logprobs != before.logprobs
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
            load_weights(engine, LoadRequest(folder=tmp_path, version=1, in_flight="keep"))
    with pytest.raises(Refused, match="follow 'keep' here, not 'abort'"):
        load_weights(engine, LoadRequest(folder=tmp_path, version=1, in_flight="abort"))
    assert engine.weight_version == 0 and (await engine.generate(PROMPT, PARAMS)).logprobs == pytest.approx(
        before.logprobs, abs=1e-5
    )
    await engine.close()
