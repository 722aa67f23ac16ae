"""Two ranks of one machine, on a CPU: what they compute is compared with one process, and a part that fails says so."""

from dataclasses import replace

import pytest

from benchmarks.two_ranks import Options, run_part, table

OPTIONS = Options(tiny=True, device="cpu", layers=1, timeout=60.0, module_layers=False)


@pytest.mark.parametrize("part", ["update", "gather", "broadcast"])
def test_a_part_compares_what_two_ranks_compute(part: str) -> None:
    lines = run_part(part, OPTIONS, 200)
    assert {line.right for line in lines} == {None, True}, lines
    assert table(lines).row_count == len(lines) >= 2


def test_a_part_that_takes_too_long_is_ended() -> None:
    [line] = run_part("update", OPTIONS, 0.0)
    assert line.right is False and line.result == "took too long and was ended"


def test_a_part_that_fails_is_wrong() -> None:
    lines = run_part("gather", replace(OPTIONS, device="no such device"), 200)
    assert "failed, see its traceback" in [line.result for line in lines if line.right is False]
