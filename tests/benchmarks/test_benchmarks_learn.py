"""The table of `benchmarks.learn` lists every method that the configuration accepts, each once."""

from pathlib import Path

import pytest

from benchmarks.demo_models import DemoModels
from benchmarks.learn import Learned, Method, configured, lines, methods
from rally.algos.advantages import ESTIMATORS
from rally.algos.losses import SURROGATES
from rally.demo.training_stages import CourseResult


@pytest.fixture
def demo(tmp_path: Path) -> DemoModels:
    """The files that a configuration names; the tests never read them."""
    models = DemoModels(tmp_path)
    models.start.mkdir()
    models.data.mkdir()
    for name in ("train", "test"):
        (models.data / f"{name}.parquet").touch()
    return models


def test_every_estimator_and_loss_is_there_once_and_so_are_the_whole_methods(demo: DemoModels) -> None:
    known = methods(demo)
    losses = [m.name for m in known if m.kind == "loss"]
    estimators = [m.name for m in known if m.kind == "estimator"]
    assert len(losses) == len({id(SURROGATES[name]) for name in losses}) == len({*map(id, SURROGATES.values())})
    assert {"remax", "gdpo", "gigpo", "reinforce_plus_plus"} < set(estimators) and "grpo_vectorized" not in estimators
    assert {id(f) for f in ESTIMATORS.values()} == {id(ESTIMATORS[n]) for n in estimators if n in ESTIMATORS}
    for method in known:
        steps = method.steps or 5
        config = configured(demo, method, seed=3, steps=steps, folder=demo.folder / "run")
        assert config.trainer.seed == 3 and config.trainer.total_training_steps == steps
    assert {"gae", "turn_gae"} <= set(estimators)
    assert {"dapo", "turn_returns", "ppo"} <= {m.name for m in known if m.kind == "method"}


def test_the_table_says_what_did_not_improve() -> None:
    def row(name: str, after: float) -> Learned:
        result = CourseResult(Path(), {"sampled": 0.3, "greedy": 0.0}, {"sampled": after, "greedy": 1.0})
        return Learned(Method("loss", name, ()), 0, 10, result, 12.3)

    _, _, better, worse, solved = lines([row("a", 0.5), row("b", 0.3), row("c", 0.9)])
    assert better == "| loss | `a` | 0 | 10 | 0.300 | 0.500 | 0.000 | 1.000 | yes |  | 12 |"
    assert "| **no** |" in worse and "| reached |" in solved
