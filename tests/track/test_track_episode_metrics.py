"""Metrics equal values computed by hand from the same episodes."""

import pytest
from track_episodes import make_episode

from rally.track import rollout_metrics
from rally.types import Episode, Segment, StopReason, ToolCall, ToolResponse, ToolResult, ToolStatus, Turn


def slow_episode() -> Episode:
    """Prompt 6, 10 sampled tokens, truncated by length, one tool call that timed out with a truncated response."""
    result = ToolResult(
        call=ToolCall(name="search"),
        status=ToolStatus.TIMEOUT,
        response=ToolResponse(text="..."),
        seconds=1.0,
        truncated=True,
    )
    segment = Segment(
        prompt_ids=(1,) * 6, response_ids=(2,) * 10, response_mask=(1,) * 10, response_logprobs=(-1.0,) * 10
    )
    turns = (
        Turn(role="assistant", text="x", start=0, end=10, finish="length", cached_tokens=1),
        Turn(role="tool", text="...", start=10, end=10, tool_results=(result,)),
    )
    return make_episode(
        "slow",
        stop_reason=StopReason.LENGTH,
        segments=(segment,),
        turns=turns,
        reward=0.0,
        timings={"generate": 1.5},
    )


def failed_episode() -> Episode:
    return make_episode(
        "failed", stop_reason=StopReason.ERROR, error="boom", segments=(), turns=(), reward=None, timings={}
    )


def test_rollout_metrics_against_a_worked_example() -> None:
    got = rollout_metrics([make_episode(), slow_episode(), failed_episode()], max_prompt_length=6)
    expected = {
        "episodes/count": 3,
        "episodes/unscored": 1,
        "episodes/masked": 0,
        "critic/score/mean": 0.5,
        "critic/score/max": 1,
        "critic/score/min": 0,
        "critic/rewards/mean": 0.5,
        "critic/rewards/max": 1,
        "critic/rewards/min": 0,
        "critic/rewards/std": 0.5,
        "response_length/mean": 16 / 3,
        "response_length/max": 10,
        "response_length/min": 0,
        "response_length/clip_ratio": 1 / 3,
        "response_length_non_aborted/mean": 8,
        "response_length_non_aborted/max": 10,
        "response_length_non_aborted/min": 6,
        "response/aborted_ratio": 1 / 3,
        "timing_s/agent_loop/slowest/generate_sequences": 1.5,
        "timing_s/agent_loop/slowest/tool_calls": 0,
        "timing_s/agent_loop/slowest/prompt_length": 6,
        "timing_s/agent_loop/slowest/response_length": 10,
        "prompt_length/mean": 5,
        "prompt_length/max": 6,
        "prompt_length/min": 4,
        "prompt_length/clip_ratio": 0.5,
        "sampled_tokens/mean": 14 / 3,
        "observed_tokens/mean": 2 / 3,
        "num_turns/mean": 8 / 3,
        "num_turns/max": 4,
        "num_turns/min": 1,
        "tool_call_counts/mean": 2 / 3,
        "tool_call_counts/max": 1,
        "tool_call_counts/min": 0,
        "tool/calls": 2,
        "tool/success_rate": 0.5,
        "tool/truncated": 1,
        "tool/ok": 1,
        "tool/timeout": 1,
        "tool/error": 0,
        "tool/unavailable": 0,
        "tool/outage_episodes": 0,
        "tool/bad_arguments": 0,
        "tool/unknown_tool": 0,
        "tool/malformed": 0,
        "tool/rejected": 0,
        "tool/redundant": 0,
        "tool/cancelled": 0,
        "tool/abandoned": 0,
        "tool/create_errors": 0,
        "tool/calc_reward_errors": 0,
        "tool/release_errors": 0,
        "tool/latency_s/p50": 0.6,
        "tool/latency_s/p95": 0.96,
        "tool/queue_s/p50": 0,
        "tool/queue_s/p95": 0,
        "timing_s/agent_loop/generate_sequences/mean": 1.0,
        "timing_s/agent_loop/generate_sequences/max": 1.5,
        "timing_s/agent_loop/generate_sequences/min": 0.5,
        "timing_s/agent_loop/tool_calls/mean": 0.2,
        "timing_s/agent_loop/tool_calls/max": 0.2,
        "timing_s/agent_loop/tool_calls/min": 0.2,
        # prompts given to the engine: 4, then 4 + 5; and 6
        "prefix_cache/hit_rate": 7 / 19,
    }
    for name, success, late, seconds in (("calculate", 1, 0, 0.2), ("search", 0, 1, 1.0)):
        told = {"calls": 1, "success_rate": success, "timeouts": late, "truncations": late, "rejected": 0, "cached": 0}
        told |= {"outages": 0}
        told |= {"redundant": 0, "queue_s/p50": 0, "queue_s/p95": 0}
        told |= {"latency_s/p50": seconds, "latency_s/p95": seconds}
        expected |= {f"tool/{name}/{key}": value for key, value in told.items()}
    expected |= {f"stop/{reason}": 0.0 for reason in StopReason}
    expected |= {"stop/stop": 1 / 3, "stop/length": 1 / 3, "stop/error": 1 / 3}
    assert got == pytest.approx(expected)


def test_tokens_of_all_segments_are_counted() -> None:
    segment = make_episode().segments[0]
    got = rollout_metrics([make_episode(segments=(segment, segment))])
    assert got["response_length/mean"] == 12 and got["sampled_tokens/mean"] == 8 and got["prompt_length/mean"] == 4


def test_simulated_users_are_counted_where_there_are_some() -> None:
    def held(score: float | None, failures: list[str], *rewards: float | None) -> Episode:
        turns = tuple(Turn(role="user", text="-", reward=reward) for reward in rewards)
        told = {"name": "gsm8k", "score": score, "failures": failures, "info": []}
        return make_episode(turns=turns, extra={"interaction": told}, timings={"interaction": 0.5})

    got = rollout_metrics([held(1.0, [], 0.0, 1.0), held(None, ["late", "lost"], None), make_episode()])
    users = {name: value for name, value in got.items() if "interaction" in name and not name.endswith(("max", "min"))}
    assert users == {
        "interaction/turns/mean": 1.5,
        "interaction/turn_score/mean": 0.5,
        "interaction/score/mean": 1.0,
        "interaction/failures": 2,
        "timing_s/agent_loop/interaction/mean": 0.5,
    }
    assert not [name for name in rollout_metrics([make_episode()]) if "interaction" in name]


def test_rates_over_nothing_are_left_out() -> None:
    got = rollout_metrics([make_episode(turns=(), timings={}, reward=None)])
    absent = {"tool/success_rate", "critic/rewards/mean", "prefix_cache/hit_rate", "tool/latency_s/p50"}
    assert not absent & set(got)
    assert rollout_metrics([]) == {"episodes/count": 0}
