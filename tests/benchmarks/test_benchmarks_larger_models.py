"""The benchmark of larger models runs on a small shape, and its plans fit one H200."""

import pytest
import torch

from benchmarks import larger_models
from benchmarks.larger_models import CASES
from rally.runs.build.models import lora_of
from rally.runs.cost_estimate import memory_problem, training_costs
from rally.runs.host_memory import host_memory_problem
from rally.runs.planned_models import size_from

H200, HOST = 139 * 2**30, 120 * 2**30


def test_a_small_shape_is_sampled_from_and_updated(capsys: pytest.CaptureFixture[str]) -> None:
    larger_models.main(["--tiny", "--rollout"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f"{name}, {what}"
        for name in ("tiny", "tiny-8bit", "tiny-lora")
        for what in ("rollout", "update, all layers recomputed", "update, as memory allows")
    ]
    assert all("3.0 layers recomputed" in line for line in lines if "update" in line), "a CPU recomputes all"


def test_what_fails_is_named_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def update(case: object, *others: object) -> str:
        asked.append(case)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("no memory is left\nmore")
        return "done"

    monkeypatch.setattr(larger_models, "update", update)
    with pytest.raises(SystemExit):
        larger_models.main(["--cases", "tiny,tiny-8bit"])
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "tiny, update, all layers recomputed: failed: OutOfMemoryError: no memory is left"
    assert len(others) == 3 and all(line.endswith(": done") for line in others)


@pytest.mark.parametrize("name", ["7b", "7b-8bit", "7b-32k", "32b-lora"])
def test_a_case_fits_one_h200_and_7b_only_with_smaller_or_offloaded_states(name: str) -> None:
    case = CASES[name]
    config, model = case.config(), case.model_config()
    size = size_from(model, lora_of(config.model, 0))
    assert memory_problem(config, model, size, 2, H200) is None
    assert host_memory_problem(config, model, size, 2, HOST) is None
    assert sum(cost.bytes for cost in training_costs(config, model, size, 2)) < H200
    if name == "7b":
        whole = case.__class__(case.shape, case.prompts, case.answers, case.prompt, case.answer).config()
        assert sum(cost.bytes for cost in training_costs(whole, model, size, 2)) > 0.95 * H200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--cases", "7b"], "need a GPU, and there is none"), (["--cases", "8b"], "there is no case 8b; known are 7b,")],
)
def test_what_cannot_run_ends_before_weights_are_made(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(larger_models, "pick_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(larger_models, "measure", lambda *_: pytest.fail("it began"))
    with pytest.raises(SystemExit):
        larger_models.main(arguments)
    assert words in capsys.readouterr().err
