"""A batch of many tokens is cheap to plan and small on the wire."""

from benchmarks.batch_plan import measure


def test_a_small_batch_is_measured() -> None:
    told = dict(measure(200_000, ranks=4, length=5000, prompt=1000, micro=16_384))
    assert told["batch"].startswith("40 rows, 0.2 M tokens")
    assert 4 < float(told["on the wire"].split()[0]) < 8
    assert 4 < float(told["rows in memory"].split()[0]) < 16
