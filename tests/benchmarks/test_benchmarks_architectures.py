"""docs/models.md says what benchmarks/architectures.json says, and that is still so for a sample of architectures."""

import json

import pytest

from benchmarks.architectures import PAGE, RECORD, examine, recorded, replaced

SAMPLE = ["qwen3", "qwen3_moe", "qwen3_next", "lfm2_moe", "deepseek_v2", "gpt_oss", "nemotron", "bloom"]


def test_the_page_equals_the_record() -> None:
    found = json.loads(RECORD.read_text())
    assert PAGE.read_text() == replaced(PAGE.read_text(), found), "run python -m benchmarks.architectures --record"
    assert len(found) > 150
    assert not any(outcome.startswith(("WRONG", "TRACEBACK")) for uses in found.values() for outcome in uses.values())
    assert sum(uses["training"] == "packed" for uses in found.values()) >= 135


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_still_has_its_verdict(name: str) -> None:
    pytest.importorskip("peft")
    assert recorded({name: examine(name)})[name] == json.loads(RECORD.read_text())[name], (
        f"run python -m benchmarks.architectures --record --only {name}"
    )
