"""Every shipped YAML is listed, loads, passes --dry-run, and trains for two steps on a CPU."""

from pathlib import Path

import pytest
from recipes.recipe_cases import SMALL_ENV, SMALL_SFT, SMALL_TRAIN, STUB_AGENT
from train_cases import Paper

from rally.config import load_config, load_sft_config
from rally.recipes import Recipe, RecipeError, find_recipe, list_recipes
from rally.recipes.catalog import FOLDER
from rally.runs import dry_run
from rally.runs import sft as sft_run
from rally.runs import train as run
from rally.track import RunFolder

TRAIN = [recipe for recipe in list_recipes() if recipe.command == "train"]
SFT = [recipe for recipe in list_recipes() if recipe.command == "sft"]


def small(recipe: Recipe, out: Path) -> list[str]:
    """Overrides for a small machine. Keys of methods that the recipe does not use would be errors."""
    text = "".join(path.read_text() for path in (recipe.path, recipe.path.parent / "train.yaml"))
    used = {"filter_groups": "filter_groups", "gen_batch_size": "gen_batch_size", "overlong": "overlong_buffer_cfg"}
    used |= {"critic": "critic:", "curriculum": "curriculum:"}
    kept = [line for line in SMALL_TRAIN if all(name not in line or sign in text for name, sign in used.items())]
    if "\nenv:" in text:
        kept = [*(line for line in kept if not line.startswith("data.val_max_samples")), *SMALL_ENV]
    if recipe.name == "repair":
        kept.append(STUB_AGENT)
    sees = ["actor_rollout_ref.model.path=models/tiny_vision"] if recipe.path.parent.name == "geometry" else []
    return [*kept, *sees, f"trainer.default_local_dir={out}"]


@pytest.mark.parametrize("recipe", TRAIN, ids=lambda recipe: recipe.name)
def test_a_recipe_trains(recipe: Recipe, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    config = load_config(recipe.path, small(recipe, tmp_path / "run"))
    paper = Paper()
    dry_run.dry_run(config, paper.console)
    assert "nothing was trained" in paper.text
    outcome = run.train(config, paper.console)
    steps = [row.step for row in RunFolder(outcome.folder).read_metrics()]
    assert steps[-1] == 2, "every step left its metrics"
    assert any(name.startswith("val-core/") for name in outcome.metrics)


@pytest.mark.parametrize("recipe", SFT, ids=lambda recipe: recipe.name)
def test_a_supervised_start_trains(recipe: Recipe, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    config = load_sft_config(recipe.path, [*SMALL_SFT, f"trainer.default_local_dir={tmp_path}"])
    paper = Paper()
    sft_run.show(config, paper.console)
    assert sft_run.check(config, paper.console), "what is taught is what would be sampled"
    assert sft_run.sft(config, paper.console).steps == 2


def test_every_yaml_is_a_recipe_or_part_of_one() -> None:
    listed = {recipe.path for recipe in list_recipes()}
    others = {path.name for path in FOLDER.glob("*/*.yaml") if path not in listed}
    assert others == {"tools.yaml", "tools_service.yaml", "users.yaml"}
    assert all(recipe.about and recipe.hardware for recipe in list_recipes())
    assert all(recipe.needs or "\nenv:" in recipe.path.read_text() for recipe in list_recipes())


def test_a_wrong_name_is_met_with_the_right_one() -> None:
    assert find_recipe("triage", "sft").name == "sft.yaml"
    with pytest.raises(RecipeError, match="did you mean gsm8k_tool/lora"):
        find_recipe("gsm8k_tool/lra", "train")
    with pytest.raises(
        RecipeError, match="no recipe 'weather' for `rally sft`; the recipes are gsm8k_tool, gsm8k_tool/sft_lora, "
    ):
        find_recipe("weather", "sft")
