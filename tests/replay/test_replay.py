"""A recorded episode can be rendered, scored and sampled again, and differences are named."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_cases import Paper, run_config, segment
from typer.testing import CliRunner

from rally.cli.main import app
from rally.config import load_config
from rally.replay.replay import Replayed, ReplayError, Verdict, find_episode, first_difference, logprob_gap, replay
from rally.runs.evaluate import evaluate
from rally.runs.train import train
from rally.track import RunFolder
from rally.types import Segment

DETERMINISTIC = "actor_rollout_ref.rollout.deterministic=true"


@pytest.fixture(scope="module")
def run(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two deterministic steps, the second with refilled groups, with shaped rewards; validation in two parts."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = run_config(
        home,
        folder,
        DETERMINISTIC,
        "actor_rollout_ref.rollout.n=2",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=score",
        "reward_shaping.penalties.invalid_tool_call=-0.25",
        "reward_shaping.penalties.max_turns_exceeded=-0.125",
        "data.val_batch_size=2",
        "trainer.total_training_steps=2",
    )
    train(config, Paper().console)
    assert RunFolder(folder).read_metrics()[-1].metrics["groups/refilled"] > 0
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def again(run: Path, id: str, *overrides: str, checkpoint: Path | None = None) -> Replayed:
    return replay(run, id, load_config(run / "config.yaml", list(overrides)), checkpoint)


def verdicts(found: Replayed) -> dict[str, Verdict]:
    return {finding.part: finding.verdict for finding in found.findings}


def words(found: Replayed, part: str) -> str:
    [finding] = [finding for finding in found.findings if finding.part == part]
    return finding.text


def change(run: Path, id: str, **fields: object) -> None:
    """Changes the record of one episode."""
    folder, step, validate = RunFolder(run), int(id[1:7]), id[0] == "v"
    episodes = [replace(e, **fields) if e.id == id else e for e in folder.read_episodes(step, validate)]
    folder.log_episodes(step, episodes, validate)


@pytest.mark.parametrize("id", ["t000001-00000-1", "t000002-00001-0", "v000000-00003-0", "v000002-00001-0"])
def test_an_episode_of_a_deterministic_run_is_the_same_bit_by_bit(run: Path, id: str) -> None:
    found = again(run, id)
    assert set(verdicts(found).values()) == {Verdict.SAME} and found.exit_code == 0, found.findings
    company = len(RunFolder(run).read_episodes(int(id[1:7]))) if id[0] == "t" else 2
    assert f"the same in {company} of {company} episodes sampled together" in words(found, "sampling")


def test_prompts_that_an_agent_wrote_itself_are_not_held_against_the_task(copy: Path) -> None:
    id = "t000001-00000-0"
    first, *rest = find_episode(RunFolder(copy), id).episode.segments
    own = replace(first, prompt_ids=first.prompt_ids[:1] + first.prompt_ids)
    change(copy, id, segments=(own, *rest), extra={"agent": {"requests": 2}})
    found = again(copy, id, DETERMINISTIC.replace("true", "false"))
    assert verdicts(found)["prompt"] is Verdict.SKIPPED and found.exit_code == 0
    assert words(found, "prompt") == "the agent wrote the prompts itself"


BATCH_REWARD = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    return [len(solution_strs) + len(text) / 100 for text in solution_strs]
"""


@pytest.fixture(scope="module")
def evaluated(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two passes of validation, sampled and greedy, in parts of two prompts; a reward that sees its whole batch."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    (folder.parent / "batch.py").write_text(BATCH_REWARD)
    config = run_config(
        home,
        folder,
        DETERMINISTIC,
        "actor_rollout_ref.rollout.val_kwargs={do_sample: true, temperature: 1.0, n: 2}",
        f"custom_reward_function.path={folder.parent / 'batch.py'}",
        "reward_model.reward_manager=batch",
        "data.val_batch_size=2",
    )
    return evaluate(config, Paper().console).folder


@pytest.mark.parametrize(("id", "company"), [("v000000-00003-1", 4), ("v000000-00003-greedy-0", 2)])
def test_each_pass_of_a_validation_is_held_again_by_itself(evaluated: Path, id: str, company: int) -> None:
    found = again(evaluated, id)
    assert set(verdicts(found).values()) == {Verdict.SAME}, found.findings
    assert f"reward {company}." in words(found, "reward")
    assert f"the same in {company} of {company} episodes sampled together" in words(found, "sampling")


def test_a_pass_that_the_configuration_no_longer_has_is_named(evaluated: Path) -> None:
    greedy = [f"actor_rollout_ref.rollout.val_kwargs.{key}" for key in ("do_sample=false", "temperature=0", "n=1")]
    found = again(evaluated, "v000000-00003-greedy-0", *greedy)
    assert verdicts(found)["sampling"] is Verdict.CANNOT and "no validation pass 'greedy'" in words(found, "sampling")


def test_it_says_which_sampled_token_departs(copy: Path) -> None:
    id = "t000002-00000-0"
    episode = find_episode(RunFolder(copy), id).episode
    [first, *rest] = episode.segments
    ids = list(first.response_ids)
    ids[3] = (ids[3] + 1) % 50
    change(copy, id, segments=(replace(first, response_ids=tuple(ids)), *rest))
    found = again(copy, id)
    assert verdicts(found) == {"prompt": "same", "reward": "same", "sampling": "different"} and found.exit_code == 1
    assert words(found, "sampling").startswith("differs at token 3 of the response, which the policy wrote: recorded ")


def test_other_weights_are_noticed_and_named(run: Path) -> None:
    found = again(run, "t000002-00000-0", checkpoint=run / "checkpoints" / "global_step_2")
    assert verdicts(found)["sampling"] is Verdict.DIFFERENT and found.exit_code == 1
    assert "weights: global_step_2, version 2, recorded under 1" in words(found, "sampling")


def test_weights_that_are_gone_are_named(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "global_step_1")
    found = again(copy, "t000002-00000-0")
    assert verdicts(found)["sampling"] is Verdict.CANNOT and found.exit_code == 2
    assert "the weights after step 1, which sampled it, no longer exist" in words(found, "sampling")


def test_a_run_that_was_not_deterministic_is_not_sampled_again(run: Path) -> None:
    other = DETERMINISTIC.replace("true", "false")
    found = again(run, "t000001-00000-0", other)
    assert verdicts(found)["sampling"] is Verdict.SKIPPED and found.exit_code == 0
    with pytest.raises(ReplayError, match=r"not made with rollout\.deterministic=true"):
        again(run, "t000001-00000-0", other, checkpoint=run / "checkpoints" / "global_step_1")


def test_another_reward_function_is_told_from_the_recorded_one(run: Path, home: Path) -> None:
    other = (DETERMINISTIC.replace("true", "false"), "custom_reward_function.reward_kwargs={bonus: 1.0}")
    found = again(run, "t000001-00000-0", *other)
    assert verdicts(found)["reward"] is Verdict.DIFFERENT and found.exit_code == 1
    [finding] = [finding for finding in found.findings if finding.part == "reward"]
    told = {name: (recorded, now) for name, recorded, now in finding.details}
    assert float(told["reward"][1]) == pytest.approx(float(told["reward"][0]) + 1.0)
    assert told["length"][0] == told["length"][1] and finding.text.startswith("in reward, score")


def test_a_reward_function_that_fails_now_cannot_be_compared(run: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def compute_score(*given, **named):\n    raise KeyError('today')\n")
    found = again(run, "t000001-00000-0", f"custom_reward_function.path={tmp_path / 'broken.py'}")
    assert verdicts(found)["reward"] is Verdict.CANNOT and "today" in words(found, "reward")
    (tmp_path / "unreadable.py").write_text("def compute_score(")
    found = again(run, "t000001-00000-0", f"custom_reward_function.path={tmp_path / 'unreadable.py'}")
    assert verdicts(found) == {"prompt": "same", "reward": "cannot", "sampling": "same"} and found.exit_code == 2


def test_what_has_another_version_now_is_told(copy: Path) -> None:
    versions = json.loads((copy / "versions.json").read_text())
    (copy / "versions.json").write_text(json.dumps({**versions, "torch": "1.0.0"}))
    done = CliRunner().invoke(app, ["replay", str(copy), "--episode", "t000001-00000-0"])
    assert f"since the run was made: torch 1.0.0 -> {versions['torch']}" in done.output


def test_a_prompt_that_is_rendered_otherwise_shows_where_it_departs(run: Path) -> None:
    shorter = ("data.max_prompt_length=6", "data.truncation=right", DETERMINISTIC.replace("true", "false"))
    found = again(run, "t000001-00000-0", *shorter)
    assert verdicts(found)["prompt"] is Verdict.DIFFERENT
    assert words(found, "prompt").startswith("token 6 of the prompt: recorded ") and ", now " in words(found, "prompt")


def test_the_command_prints_and_exits_as_it_found(run: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(run), "--episode", "t000001-00000-0"])
    assert done.exit_code == 0, done.output
    assert "prompt: same: " in done.output and "sampling: same: " in done.output
    other = ["custom_reward_function.reward_kwargs={bonus: 1.0}"]
    assert CliRunner().invoke(app, ["replay", str(run), "--episode", "t000001-00000-0", *other]).exit_code == 1


@pytest.mark.parametrize(
    ("id", "said"),
    [
        ("first", "'first' is not an episode id; ids look like t000003-00001-2"),
        ("t000009-00000-0", "has no training episodes of step 9"),
        ("t000001-00000-7", "has no episode t000001-00000-7; its first is t000001-"),
    ],
)
def test_an_episode_that_is_not_there_is_named(run: Path, id: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        again(run, id)


def test_replaying_changes_no_file(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    again(run, "v000000-00000-0")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


patterns = st.lists(st.text("so", min_size=1, max_size=9), min_size=1, max_size=3)


@given(patterns, st.randoms(), st.data())
def test_the_first_token_that_was_changed_is_found(shapes: list[str], rng: random.Random, data: st.DataObject) -> None:
    was = [segment(rng, shape) for shape in shapes]
    assert first_difference(was, was) is None and logprob_gap(was, was) is None
    number = data.draw(st.integers(0, len(was) - 1))
    place = data.draw(st.integers(0, len(shapes[number]) - 1))
    now = list(was)
    now[number] = _changed(was[number], place)
    found = first_difference(was, now)
    assert found is not None and (found.segment, found.place) == (number, place)
    assert found.writer == ("policy" if shapes[number][place] == "s" else "tool or user")
    assert logprob_gap(was, now, found) is None, "what comes after the first difference says nothing more"


@given(patterns, st.randoms())
def test_log_probabilities_that_moved_are_counted(shapes: list[str], rng: random.Random) -> None:
    was = [segment(rng, shape) for shape in shapes]
    now = [replace(one, response_logprobs=tuple(p - 0.5 * m for p, m in _scored(one))) for one in was]
    gap, sampled = logprob_gap(was, now), sum(one.sampled for one in was)
    assert first_difference(was, now) is None and (gap is None) == (sampled == 0)
    if gap is not None:
        assert (gap.count, gap.of) == (sampled, sampled) and gap.largest == pytest.approx(0.5)
        assert was[gap.segment].response_mask[gap.place] == 1


def test_a_history_that_ends_earlier_departs_there() -> None:
    was = segment(random.Random(0), "ssos")
    shorter = Segment(
        prompt_ids=was.prompt_ids,
        response_ids=was.response_ids[:3],
        response_mask=was.response_mask[:3],
        response_logprobs=was.response_logprobs[:3],
    )
    found = first_difference([was], [shorter])
    assert found is not None and (found.place, found.writer) == (3, "policy")
    assert first_difference([was, was], [was]) is not None


def _changed(one: Segment, place: int) -> Segment:
    ids = list(one.response_ids)
    ids[place] += 1
    return replace(one, response_ids=tuple(ids))


def _scored(one: Segment) -> list[tuple[float, int]]:
    return list(zip(one.response_logprobs, one.response_mask, strict=True))
