"""The workloads are the published ones, every engine gets the same requests, and the tables name what they compare."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from benchmarks import rollout, rollout_engines
from benchmarks.rollout_engines import Logprobs, SGLang, Vllm, random_model, shape_named
from benchmarks.rollout_workloads import Played, Reply, Workload, play, scripts
from rally.types import RallyError

SMALL = Workload(name="small", conversations=4, prompt=5, new=3, turns=3, observed=2, tool_seconds=0.01, group=2)


def test_the_workloads_are_the_published_ones() -> None:
    single, multi, groups = (Workload.named(name) for name in ("single", "multi-1024", "multi-256-groups"))
    assert (single.conversations, single.longest, single.sampled) == (256, 456, 256 * 256)
    assert (multi.conversations, multi.longest, multi.sampled) == (1024, 1296, 1024 * 640)
    assert (groups.conversations, groups.group, groups.tool_seconds) == (256, 8, 0.5)


@pytest.mark.parametrize("name", ["", "multi", "multi-0", "single-4", "multi-12-groups", "multi-8-group"])
def test_another_workload_is_refused_in_words(name: str) -> None:
    with pytest.raises(RallyError, match=r"workload|groups"):
        Workload.named(name)


def test_conversations_are_drawn_from_the_seed_and_groups_share_their_prompt_only() -> None:
    drawn = scripts(SMALL, 1000, seed=1)
    assert drawn == scripts(SMALL, 1000, seed=1)
    assert drawn[0].prompt == drawn[1].prompt and drawn[0].observed != drawn[1].observed
    assert drawn[0].prompt != drawn[2].prompt and drawn[0].prompt != scripts(SMALL, 1000, seed=2)[0].prompt
    assert all(0 <= pause <= SMALL.tool_seconds for script in drawn for pause in script.pauses)


def test_each_turn_continues_the_whole_history_and_all_begin_at_once() -> None:
    asked: list[list[int]] = []

    async def sample(ids: Sequence[int], count: int) -> Reply:
        asked.append(list(ids))
        await asyncio.sleep(0.01)
        return Reply([7] * count, [-1.0] * count, len(ids) // 2)

    played = asyncio.run(play(sample, SMALL, 1000, seed=1))
    drawn = scripts(SMALL, 1000, seed=1)
    assert asked[:4] == [script.prompt for script in drawn]
    whole = [*drawn[2].prompt, 7, 7, 7, *drawn[2].observed[0], 7, 7, 7, *drawn[2].observed[1]]
    assert whole in asked
    assert (played.sampled, played.prompted) == (36, 4 * (5 + 10 + 15)) and 0 < played.cached < played.prompted


def test_a_turn_cut_short_is_no_measurement() -> None:
    async def sample(ids: Sequence[int], count: int) -> Reply:
        return Reply([7], [-1.0], 0)

    with pytest.raises(AssertionError, match="early"):
        asyncio.run(play(sample, SMALL, 1000, seed=1))


def test_logprobs_of_generate_are_those_of_a_full_forward() -> None:
    model = random_model(shape_named("tiny"))
    ids = torch.randint(512, (3, 9), generator=torch.Generator().manual_seed(0)).to(model.device)
    seen = Logprobs()
    sampling = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=5, pad_token_id=0)
    output: Any = model.generate(ids, generation_config=sampling, logits_processor=[seen])
    seen.look_up(output[:, -1:])
    with torch.no_grad():
        logp = torch.log_softmax(model(output).logits.float(), -1)[:, 8:-1].gather(2, output[:, 9:, None]).squeeze(2)
    torch.testing.assert_close(torch.cat(seen.steps, 1), logp, rtol=1e-4, atol=1e-4 if logp.is_cpu else 5e-2)


def test_one_command_times_profiles_and_writes_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_engines, "find_spec", lambda name: None)
    out, trace = tmp_path / "new" / "table.md", tmp_path / "trace.txt"
    chosen = ["--engine", "embedded,hf,vllm", "--shape", "tiny", "--workloads", "single,multi-32", "--running", "8"]
    rollout.main([*chosen, "--out", str(out), "--profile", str(trace)])
    assert "vllm is not installed" in capsys.readouterr().out
    rows = [line.split(" | ") for line in out.read_text().splitlines() if line.startswith("| ")]
    assert [(row[0], row[2]) for row in rows[2:5]] == [
        ("| embedded", "single"),
        ("| embedded", "multi-32"),
        ("| hf", "single"),
    ]
    assert rows[-1][:4] == ["| embedded", "8", "single", "hf, in this run"]
    profiled = (tmp_path / "trace-8.txt").read_text()
    assert "ms a step" in profiled and "aten::" in profiled


def test_an_engine_that_fails_costs_no_other_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play = rollout_engines.HuggingFace.play

    async def fails(self: Any, workload: Workload, seed: int) -> Played:
        if seed >= 0:
            raise RuntimeError("no kernel")
        return await play(self, workload, seed)

    monkeypatch.setattr(rollout_engines.HuggingFace, "play", fails)
    out = tmp_path / "table.md"
    chosen = ["--engine", "hf,embedded", "--shape", "tiny", "--workloads", "single", "--running", "8"]
    with pytest.raises(SystemExit) as exit_:
        rollout.main([*chosen, "--out", str(out)])
    assert exit_.value.code == 1 and "hf failed: RuntimeError: no kernel" in capsys.readouterr().err
    assert "| embedded | 8 | single |" in out.read_text() and "| hf |" not in out.read_text()


def test_figures_from_elsewhere_say_so() -> None:
    played = Played(seconds=10.0, sampled=256 * 640, prompted=1, cached=0, waited=1.0)
    timing = rollout.Timing(
        engine="embedded", running=256, workload=Workload.named("multi-256"), played=played, steps=None, peak_bytes=0
    )
    against = {row[3]: row[4] for row in rollout.ratio_cells(timing, [timing], shape_named("qwen2.5-1.5b"))}
    (sglang,) = (name for name in against if name.startswith("SGLang"))
    assert rollout.ELSEWHERE in sglang and against[sglang] == f"{25.6 / 39.7:.2f}x"


@pytest.mark.parametrize("option", ["--engine=tgi", "--shape=gpt-5", "--workloads=chat"])
def test_an_unknown_name_is_one_sentence(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        rollout.main(["--shape", "tiny", option])
    assert exit_.value.code == 2 and "there is no" in capsys.readouterr().err


def test_fp8_is_for_our_engines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rollout.main(["--shape", "tiny", "--engine", "embedded,hf", "--quantization", "fp8"])
    assert "--quantization is for engines of Rally, not for hf; leave them out" in capsys.readouterr().err


def test_sglang_answers_are_read_as_it_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def __init__(self, **settings: Any) -> None:
            assert (Path(settings["model_path"]) / "config.json").is_file()

        async def async_generate(self, **request: Any) -> dict[str, Any]:
            count = request["sampling_params"]["max_new_tokens"]
            told = {"output_token_logprobs": [(-0.5, 9, None)] * count, "cached_tokens": 2}
            return {"output_ids": [9] * count, "meta_info": told}

        def shutdown(self) -> None: ...

    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=Engine))
    reply = asyncio.run(_one_reply(SGLang))
    assert reply == Reply([9, 9], [-0.5, -0.5], 2)


def test_vllm_answers_are_read_as_it_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class AsyncLLM:
        @classmethod
        def from_engine_args(cls, settings: SimpleNamespace) -> "AsyncLLM":
            assert (Path(settings.model) / "config.json").is_file()
            return cls()

        async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
            at = [{9: SimpleNamespace(logprob=-0.5)}] * params.max_tokens
            sampled = SimpleNamespace(token_ids=[9] * params.max_tokens, logprobs=at)
            yield SimpleNamespace(outputs=[sampled], num_cached_tokens=None)

        def shutdown(self) -> None: ...

    names: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": SimpleNamespace, "TokensPrompt": dict},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": SimpleNamespace},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2)},
    }
    for name in ("vllm.engine", "vllm.v1", "vllm.v1.engine", *names):
        module = ModuleType(name)
        module.__dict__.update(names.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    assert asyncio.run(_one_reply(Vllm)) == Reply([9, 9], [-0.5, -0.5], 0)


async def _one_reply(kind: type[SGLang] | type[Vllm]) -> Reply:
    engine = kind(shape_named("tiny"), 64, 4)
    reply = await engine.sample([1, 2, 3], 2)
    await engine.close()
    return reply
