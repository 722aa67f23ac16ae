"""Episodes in which a tool was unavailable leave no trace in the loss; those that failed by the policy's fault do."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rollout import LENIENT, T00, T01, T10, T11, FakeRunner, collect, good, ids, rollout
from test_rollout_dynamic_sampling import live_groups, places_of, played
from train_cases import Paper, run_config

from rally.loops import AgentLoopBase, AgentLoopOutput
from rally.runs.train import train
from rally.track import RunFolder
from rally.track.metrics.episode_metrics import rollout_metrics
from rally.track.metrics.tool_metrics import tool_warnings
from rally.track.metrics.validation_metrics import validation_metrics
from rally.train.batch import build_batch
from rally.train.rollout.rollout import FailurePolicy, RolloutError, settle
from rally.types import Episode, StopReason, ToolCall

ALL = FailurePolicy(max_failed_share=1.0, max_outage_share=1.0)


def down(name: str, group: str, on_outage: str = "mask", reward: float | None = 0.0, tool: str = "search") -> Episode:
    outage = {"on_outage": on_outage, "calls": {tool: 2}, "first": f"{tool}: nobody listens"}
    return replace(good(name, group, reward), extra={"tool_outage": outage})


def faulty(name: str, group: str) -> Episode:
    """An episode whose agent raised on what the policy wrote."""
    return replace(
        good(name, group, None),
        stop_reason=StopReason.ERROR,
        error="KeyError: 'no such tool'",
        extra={"fault": "policy"},
    )


@pytest.mark.drill(
    "reliability",
    "A tool's server is down during some episodes of a step",
    "They are kept out of the loss and of the baseline of their groups",
)
def test_a_masked_episode_is_in_no_loss_and_in_no_baseline() -> None:
    group = [good("a0", "a", 1.0), good("a1", "a", 0.0), down("a2", "a"), good("a3", "a", 1.0)]
    other = [good("b0", "b", 1.0), good("b1", "b", 0.0)]
    result = settle([*group, *other], ALL)
    assert ids(result.episodes) == ["a0", "a1", "a3", "b0", "b1"] and ids(result.masked) == ["a2"]
    whole, clean = build_batch(result.episodes), build_batch([e for e in [*group, *other] if e.id != "a2"])
    assert torch.equal(whole.advantages_M, clean.advantages_M)
    assert sorted(ids(result.everything)) == sorted(ids([*group, *other])), "all are recorded"
    assert result.metrics()["failures/outage"] == 1.0 and result.dropped_groups == 0


def test_drop_group_and_count() -> None:
    dropped = settle([good("a0", "a"), down("a1", "a", "drop_group"), good("b0", "b"), good("b1", "b")], ALL)
    assert ids(dropped.episodes) == ["b0", "b1"] and ids(dropped.set_aside) == ["a0"] and ids(dropped.masked) == ["a1"]
    counted = settle([good("a0", "a"), down("a1", "a", "count")], ALL)
    assert ids(counted.episodes) == ["a0", "a1"] and not counted.masked


def test_a_single_episode_that_is_left_has_nothing_to_be_compared_with() -> None:
    result = settle([good("a0", "a"), down("a1", "a"), good("b0", "b"), good("b1", "b")], ALL)
    assert ids(result.episodes) == ["b0", "b1"] and ids(result.set_aside) == ["a0"] and result.dropped_groups == 1
    alone = settle([good("a0", "a"), down("b0", "b")], ALL)
    assert ids(alone.episodes) == ["a0"], "a group of one was one before"


def test_a_greedy_episode_that_is_lost_takes_its_group_with_it() -> None:
    greedy = replace(down("a-greedy", "a"), baseline=True)
    result = settle([good("a0", "a"), good("a1", "a"), greedy, good("b0", "b"), good("b1", "b")], ALL)
    assert ids(result.episodes) == ["b0", "b1"] and result.dropped_groups == 1


def test_a_failed_episode_with_an_outage_is_an_outage_and_no_failure() -> None:
    result = settle(
        [down("a0", "a", reward=None), good("a1", "a"), good("a2", "a")], FailurePolicy(max_failed_share=0.0)
    )
    assert ids(result.episodes) == ["a1", "a2"] and not result.failed


@pytest.mark.drill(
    "reliability",
    "Every episode of a step fails because of a tool's infrastructure",
    "The run stops with a sentence that names the tool",
)
@pytest.mark.parametrize(("lost", "share", "stops"), [(2, 0.5, False), (3, 0.5, True), (3, 1.0, False), (4, 1.0, True)])
def test_too_many_outages_stop_the_run(lost: int, share: float, stops: bool) -> None:
    names = ["a0", "a1", "b0", "b1"]
    episodes = [down(n, n[0]) if i < lost else good(n, n[0]) for i, n in enumerate(names)]
    policy = FailurePolicy(max_outage_share=share)
    if not stops:
        assert len(settle(episodes, policy).masked) == lost
        return
    with pytest.raises(
        RolloutError, match=rf"unavailable in {lost} of 4 episodes .*search: nobody listens; repair the"
    ):
        settle(episodes, policy)


def test_metrics_and_warnings_tell_outages_by_tool() -> None:
    episodes = [good("a0", "a", 1.0), down("a1", "a"), down("b0", "b", "drop_group", tool="code"), good("b1", "b", 0.0)]
    metrics = rollout_metrics(episodes)
    assert (metrics["episodes/masked"], metrics["tool/outage_episodes"]) == (2, 2)
    assert (metrics["tool/search/outage_episodes"], metrics["tool/code/outage_episodes"]) == (1, 1)
    assert metrics["critic/rewards/mean"] == 0.5, "the rewards of masked episodes are not averaged"
    told = [warning.text for warning in tool_warnings(episodes)]
    assert any("the tool 'search' was unavailable in 1 of 4 episodes" in text for text in told)
    assert any("on_outage=drop_group decides" in text for text in told)
    checked = validation_metrics([good("a0", "a", 1.0), down("b0", "b")], 1)
    assert checked["val-aux/masked"] == 1 and checked["val-core/rally/arithmetic/reward/mean@1"] == 1.0


def test_dynamic_sampling_judges_a_group_by_what_is_left_of_it() -> None:
    groups = live_groups(places=4, wanted=2, first=2, policy=ALL)
    kinds: dict[str, Any] = {"0": "live", "1": "live", "2": "live", "3": "live"}
    result = played(groups, list(kinds.values()), random.Random(0))
    assert places_of(result.episodes) == [0, 1]
    fresh = live_groups(places=4, wanted=1, first=1, policy=ALL)
    (first, second), more = fresh.begin(), []
    more += fresh.after([good(first.episode_id, first.group, 1.0)])
    more += fresh.after([down(second.episode_id, second.group)])
    assert [job.group for job in more] == ["t000001-00001"] * 2, "the lost group is replaced"
    assert first.group not in fresh.live


@pytest.mark.drill(
    "reliability",
    "An agent's code raises on what the policy wrote",
    "What was sampled is kept, and rollout.on_error decides what it is worth",
)
@pytest.mark.parametrize(
    ("on_error", "trained", "reward"),
    [("retry", [T00, T01, T10, T11], 0.5), ("zero", [T00, T01, T10, T11], 0.0), ("drop_group", [T10, T11], None)],
)
def test_a_fault_of_the_policy_is_trained_on(on_error: Any, trained: list[str], reward: float | None) -> None:
    policy = replace(LENIENT, loop=on_error)
    result = collect(rollout(policy, FakeRunner({T01: faulty})))
    assert ids(result.episodes) == trained and result.metrics()["failures/policy"] == 1.0
    (kept,) = [e for e in result.everything if e.id == T01]
    assert kept.segments and (kept.error, kept.reward) == ("KeyError: 'no such tool'", reward)
    if reward is not None:
        assert len(build_batch(result.episodes).rows) == 4


def test_faults_of_the_policy_do_not_use_up_the_budget_of_failures() -> None:
    strict = FailurePolicy(loop="zero", max_failed_share=0.0)
    assert len(settle([faulty("a0", "a"), good("a1", "a")], strict).episodes) == 2
    with pytest.raises(RolloutError, match="the failure policy is to stop the run: KeyError"):
        settle([faulty("a0", "a"), good("a1", "a")], FailurePolicy(loop="raise"))
    many = [faulty(f"a{i}", "a") for i in range(8)]
    with pytest.raises(RolloutError, match=r"all 8 episodes failed in the agent's code .* KeyError: 'no such tool'"):
        settle(many, strict)


class Caller(AgentLoopBase):
    """Samples one turn. Of each group, the episodes of the listed numbers call the tool or raise."""

    def __init__(self, calling: str = "", raising: str = "") -> None:
        self.calling, self.raising = calling.split("_"), raising.split("_")

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        prompt = self.codec.encode_prompt(self.task.prompt)
        generation = await self.server.generate(prompt, {**sampling_params, "max_tokens": 4})
        number = self.context.episode_id.rpartition("-")[2]
        if number in self.calling:
            await self.toolbox.open(self.task, self.context.episode_id).run([ToolCall(name="lookup")])
        if number in self.raising:
            raise KeyError("no such tool")
        mask = [1] * len(generation.ids)
        return AgentLoopOutput(prompt_ids=prompt, response_ids=generation.ids, response_mask=mask)


def trained(home: Path, folder: Path, *overrides: str, patience: int = 5) -> RunFolder:
    (folder / "tools.yaml").write_text("tools: [{class_name: down_tool.Lookup}]")
    keys = [
        f"multi_turn.tool_config_path={folder / 'tools.yaml'}",
        f"agent_loop_class={__name__}.Caller",
        "agent_loop_config.tools=[lookup]",
        *overrides,
    ]
    settings = [f"actor_rollout_ref.rollout.{key}" for key in keys]
    more = ["trainer.val_before_train=false", "data.val_files=null", f"trainer.guards.patience={patience}"]
    train(run_config(home, folder / "out", *more, *settings), Paper().console)
    return RunFolder(folder / "out")


def test_a_run_goes_on_without_the_episodes_that_an_outage_hit(home: Path, tmp_path: Path) -> None:
    run = trained(home, tmp_path, "agent_loop_config.calling='1'")
    episodes = run.read_episodes(1)
    lost = [e for e in episodes if e.outage is not None]
    assert len(lost) * 4 == len(episodes) and all(e.id.endswith("-1") for e in lost)
    assert lost[0].extra["tool_outage"]["first"] == "lookup: ConnectionRefusedError: nobody listens"
    assert not {e.id for e in lost} & run.read_advantages(1).keys(), "they have no advantage"
    assert len(run.read_advantages(1)) == len(episodes) - len(lost)
    metrics = run.read_metrics()[0].metrics
    assert metrics["tool/lookup/outage_episodes"] == metrics["failures/outage"] == len(lost)


def test_a_run_whose_tool_is_down_stops_with_the_reason_and_keeps_the_episodes(home: Path, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="lookup: ConnectionRefusedError: nobody listens; repair the tool"):
        trained(home, tmp_path, "agent_loop_config.calling='0_1_2'")
    assert any(e.outage for e in RunFolder(tmp_path / "out").read_episodes(1))
    counted = trained(home, tmp_path, "agent_loop_config.calling='0_1_2'", "multi_turn.on_tool_outage=count")
    assert len(counted.read_advantages(1)) == len(counted.read_episodes(1))


def test_a_run_that_loses_every_group_again_and_again_stops(home: Path, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="in each of the last 2 steps, up to step 2, every group was dropped"):
        trained(home, tmp_path, "agent_loop_config.calling='0_1_2'", "max_outage_share=1.0", patience=2)


def test_a_loop_that_raises_keeps_what_was_sampled_and_it_is_trained_on(home: Path, tmp_path: Path) -> None:
    run = trained(home, tmp_path, "agent_loop_config.raising='2'", "on_error=zero")
    failed = [e for e in run.read_episodes(1) if e.error]
    assert failed and all(e.error == "KeyError: 'no such tool'" and e.extra["fault"] == "policy" for e in failed)
    assert all(e.segments[0].sampled and e.turns[0].role == "assistant" and e.reward == 0.0 for e in failed)
    assert {e.id for e in failed} <= run.read_advantages(1).keys()
    assert run.read_metrics()[0].metrics["failures/policy"] == len(failed)
