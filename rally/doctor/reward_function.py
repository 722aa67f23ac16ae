"""Doctor checks of the objective, and of the reward function: a good answer must score higher than a bad one, for every
data source.

The good answer is the row's ground truth in the formats that reward functions parse; the one that scores highest
counts. Each is scored in an episode of one and of two assistant turns, because some reward functions need a second one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rally.config.actor import LOSS_MODES
from rally.config.algorithm import ESTIMATORS
from rally.doctor.check_context import DoctorCase, Finding
from rally.rewards import RewardSpec, Score, Scorer
from rally.runs import build
from rally.runs.build.models import import_external_libs
from rally.runs.build.update_settings import check_objective
from rally.types import Episode, Generation, Segment, StopReason, Task, Turn

BAD = "I do not know."
MOST_SOURCES = 8
FORMS = (
    "#### {}",
    "\\boxed{{{}}}",
    "Answer: {}",
    "Answer: \\boxed{{{}}}",
    "<answer>{}</answer>",
    "<think>It follows.</think>\n\\boxed{{{}}}",
    "{}",
)


class CandidateAnswer(NamedTuple):
    text: str
    rounds: int


class ScoredCandidate(NamedTuple):
    answer: CandidateAnswer
    score: Score

    @property
    def earned(self) -> float:
        assert self.score.reward is not None
        return self.score.reward


def objective(case: DoctorCase) -> Iterator[Finding]:
    """The policy loss and the advantage estimator are known; those of the user's modules are tried."""
    import_external_libs(case.config)
    check_objective(case.config)
    estimator, mode = case.config.algorithm.adv_estimator, case.config.actor.policy_loss.loss_mode
    own = [name for name, known in ((estimator, ESTIMATORS), (mode, LOSS_MODES)) if name not in known]
    tried = f"; {' and '.join(own)} worked on made-up tokens" if own else ""
    yield Finding("objective", "ok", f"advantages by {estimator}, policy loss {mode}{tried}")


async def _score(spec: RewardSpec, timeout: float, episodes: list[Episode]) -> list[Score]:
    async with Scorer(spec, 1, timeout) as scorer:
        if spec.batch:
            return await scorer.score_batch(episodes)
        return [await scorer.score(episode) for episode in episodes]


def reward(case: DoctorCase) -> Iterator[Finding]:
    if case.config.env.entries:
        yield Finding("reward", "ok", "the environment gives the reward")
        return
    if not case.tasks:
        yield Finding("reward", "warning", "skipped, because there are no rows with a ground truth")
        return
    if case.config.reward_model.enable:
        yield Finding("reward", "warning", "skipped, because it needs the reward model; the run starts with loading it")
        return
    by_source = {task.data_source: task for task in reversed(case.tasks)}
    tasks = list(by_source.values())[-MOST_SOURCES:]
    spec = build.reward_spec_of(case.config)
    for task in reversed(tasks):
        user_answer = case.options.answer if task is case.tasks[0] else None
        known = user_answer is not None or task.ground_truth is not None
        good = good_answers(task, user_answer) if known else []
        answers = [*good, CandidateAnswer(BAD, 1), CandidateAnswer(BAD, 2)]
        episodes = [episode_of(task, answer) for answer in answers]
        scores = asyncio.run(_score(spec, case.config.reward.timeout, episodes))
        yield judge(task, [ScoredCandidate(*pair) for pair in zip(answers, scores, strict=True)], spec, user_answer)


def good_answers(task: Task, user_answer: str | None) -> list[CandidateAnswer]:
    texts = [user_answer] if user_answer is not None else [form.format(text) for text in truths(task) for form in FORMS]
    return [CandidateAnswer(text, rounds) for rounds in (1, 2) for text in texts]


def truths(task: Task) -> list[str]:
    """The ground truth as text: the first of several accepted answers; for a mapping also its JSON."""
    truth: Any = task.ground_truth
    texts = [json.dumps(truth, ensure_ascii=False, default=str)] if isinstance(truth, Mapping) else []
    for _ in range(3):
        if isinstance(truth, Mapping):
            truth = truth.get("target", next(iter(truth.values()), ""))
        elif isinstance(truth, (list, tuple)):
            truth = next(iter(truth), "")
    return [*texts, str(truth)]


def episode_of(task: Task, answer: CandidateAnswer) -> Episode:
    """An episode that ends with the answer, with placeholder tokens."""
    last = Turn(role="assistant", text=answer.text, finish="stop")
    before = (Turn(role="assistant", text="Let me see."), Turn(role="user", text="Go on."))
    token = Segment(prompt_ids=(0,)).append_sampled(Generation(ids=(0,), logprobs=(0.0,), finish="stop"))
    return Episode(
        id="doctor",
        task=task,
        group="doctor",
        stop_reason=StopReason.STOP,
        segments=(token,),
        turns=(*before, last) if answer.rounds == 2 else (last,),
    )


def judge(task: Task, tried: Sequence[ScoredCandidate], spec: RewardSpec, user_answer: str | None) -> Finding:
    failed = next((one for one in tried if one.score.error is not None), None)
    if failed is not None:
        problem = f"{task.data_source}: the reward function failed on {failed.answer.text!r} ({failed.score.error})"
        return Finding("reward", "error", f"{problem}; fix it, or the row {task.id}")
    if all(one.answer.text == BAD for one in tried):
        problem = (
            f"{task.data_source}: the function scores {BAD!r} {tried[0].earned:g}, and row {task.id} has no ground"
        )
        return Finding("reward", "warning", f"{problem} truth to score; give an answer with --answer 'TEXT'")
    lowest = {one.answer.rounds: one.earned for one in tried if one.answer.text == BAD}
    best = max((one for one in tried if one.answer.text != BAD), key=lambda one: one.earned - lowest[one.answer.rounds])
    earned = f"{best.answer.text!r} scores {best.earned:g}, {BAD!r} {lowest[best.answer.rounds]:g}"
    if best.earned > lowest[best.answer.rounds]:
        seconds = max(one.score.seconds for one in tried)
        return Finding("reward", "ok", f"{task.data_source}: {earned}; at most {seconds:.3f} s a score")
    problem = f"{task.data_source}: a good answer scores no more than a bad one ({earned})"
    if spec.path is not None and user_answer is None:
        advice = "if your function expects another format, give an answer that it must reward with --answer 'TEXT'"
        return Finding("reward", "warning", f"{problem}; {advice}")
    return Finding("reward", "error", f"{problem}; fix the reward function or the ground truth of row {task.id}")
