"""User-defined agent loops: found by name, path or file, built with their options, with clear errors."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_cases import Held, Reply, calculator, hold, make_job, make_runner, make_task, said, sampling_of, tiny_codec

from rally.chat import ChatCodec
from rally.loops import (
    AgentLoopBase,
    AgentLoopOutput,
    LoopError,
    LoopSpec,
    SingleTurnAgentLoop,
    find_loop,
    load_loop_config,
    register,
)
from rally.loops import registry as loop_registry
from rally.tools import function_tool


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes what a test registers."""
    monkeypatch.setattr(loop_registry, "_LOOPS", dict(loop_registry._LOOPS))
    yield


class Twice(AgentLoopBase):
    """Samples, adds a message of its own, and samples again; returns plain lists."""

    def __init__(self, word: str = "again", max_tokens: int = 50) -> None:
        self.word = word
        self.max_tokens = max_tokens

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        prompt = list(self.codec.encode_prompt(self.task.prompt))
        params = {**sampling_params, "max_new_tokens": self.max_tokens}
        first = await self.server.generate(prompt, params)
        between = list(self.codec.encode_delta([{"role": "user", "content": self.word}]))
        second = await self.server.generate([*prompt, *first.ids, *between], params)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[*first.ids, *between, *second.ids],
            response_mask=[1] * len(first.ids) + [0] * len(between) + [1] * len(second.ids),
            response_logprobs=[*first.logprobs, *[0.0] * len(between), *second.logprobs],
            num_turns=4,
            reward_score=0.5,
            turn_rewards=[0.1, 0.4],
            extra_fields={"level": row_fields.get("level")},
        )


def with_loop(codec: ChatCodec, cls: Any, **options: Any) -> Any:
    return make_runner(codec, [Reply(said(codec, "yes"))], loop="mine", loops={"mine": LoopSpec(cls, options)})


async def test_plain_lists_and_own_options(tiny: ChatCodec) -> None:
    held = await hold(with_loop(tiny, Twice, word="really"), make_task(row={"level": 3}))
    episode, (first, second) = held.episode, held.engine.calls
    assert episode.error is None
    assert held.segment.ids == second.prompt + second.generation.ids
    assert second.prompt[: len(first.prompt)] == first.prompt
    sampled = [t for t, m in zip(held.segment.response_ids, held.segment.response_mask, strict=True) if m]
    assert sampled == [*first.generation.ids, *second.generation.ids]
    assert "really" in tiny.decode(second.prompt)
    assert (episode.reward, episode.stop_reason) == (0.5, "stop")
    assert episode.extra == {"level": 3, "turn_rewards": [0.1, 0.4], "num_turns": 4}
    assert episode.timings["generate"] <= episode.timings["total"]
    assert [turn.role for turn in episode.turns] == ["assistant", "tool", "assistant"]
    spoken = [turn.text for turn in episode.turns if turn.role == "assistant"]
    assert spoken == ["yes", "done"], "what a reward is given"


async def test_a_loop_asked_for_by_class_beats_the_name_in_a_row(tiny: ChatCodec) -> None:
    runner = with_loop(tiny, Twice)
    runner.override_rows = True
    assert (await hold(runner, make_task(agent_name="single_turn_agent"))).episode.reward == 0.5


async def test_the_server_fills_in_what_the_run_decides(tiny: ChatCodec) -> None:
    first, second = (await hold(with_loop(tiny, Twice, max_tokens=9))).engine.calls
    assert (first.session, first.params.max_tokens) == ("e0", 9)
    assert first.params.stop_ids == tiny.stop_ids
    assert first.params.seed != second.params.seed, "two turns must not sample with the same numbers"
    again = (await hold(with_loop(tiny, Twice, max_tokens=9))).engine.calls
    assert [c.params for c in again] == [first.params, second.params], "the same job samples the same"
    runner = with_loop(tiny, Twice)
    await runner.run([make_job(seed=8)], sampling_of(tiny))
    assert runner.engine.calls[0].params.seed != first.params.seed


async def test_an_unknown_sampling_parameter_is_named(tiny: ChatCodec) -> None:
    class Warm(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
            await self.server.generate([1], {"temprature": 2})
            raise AssertionError

    assert "unknown sampling parameter temprature" in (await failure(tiny, Warm))


@pytest.mark.drill("reliability", "An agent loop raises SystemExit or KeyboardInterrupt", "Its episode has the error")
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, BaseException])
async def test_whatever_a_loop_raises_is_the_error_of_its_episode(tiny: ChatCodec, error: type[BaseException]) -> None:
    class Failing(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
            raise error

    assert error.__name__ in (await failure(tiny, Failing))


async def test_registered_loops_are_chosen_by_the_agent_name_column(tiny: ChatCodec) -> None:
    register("twice")(Twice)
    runner = make_runner(tiny, loop="single_turn_agent")
    jobs = [make_job(make_task(agent_name=name), i) for i, name in enumerate(["twice", None, "tool_agent"])]
    await runner.run(jobs, sampling_of(tiny))
    assert [runner.engine.turns[f"e{i}"] for i in range(3)] == [2, 1, 1]


MODULE = """
from rally.loops import AgentLoopBase, AgentLoopOutput

class Quiet(AgentLoopBase):
    def __init__(self, length=1):
        self.length = length

    async def run(self, sampling_params, **row_fields):
        return AgentLoopOutput(prompt_ids=[1], response_ids=[5] * self.length, response_mask=[0] * self.length)

class Stranger:
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module in the working folder."""
    name = f"loops_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


async def test_a_dotted_path_names_a_class(tiny: ChatCodec, module: str) -> None:
    held = await hold(make_runner(tiny, loop=f"{module}.Quiet"))
    assert (held.segment.response_ids, held.segment.response_logprobs) == ((5,), (0.0,))


async def test_a_config_file_names_classes_and_options(tiny: ChatCodec, module: str, tmp_path: Path) -> None:
    path = tmp_path / "agents.yaml"
    path.write_text(
        f"- name: long\n  _target_: {module}.Quiet\n  length: 3\n- name: short\n  _target_: {module}.Quiet\n"
    )
    loops = load_loop_config(path)
    assert set(loops) == {"long", "short"}
    runner = make_runner(tiny, loop="short", loops=loops)
    assert len((await hold(runner)).segment.response_ids) == 1
    assert len((await hold(runner, make_task(agent_name="long"))).segment.response_ids) == 3


def test_a_config_entry_comes_before_a_registered_loop() -> None:
    mine = LoopSpec(Twice, {"word": "w"})
    assert find_loop("single_turn_agent", {"single_turn_agent": mine}) is mine
    assert find_loop("single_turn_agent").cls is SingleTurnAgentLoop


def test_unknown_loops_are_refused_in_words(module: str) -> None:
    with pytest.raises(
        LoopError, match=r"no agent loop called 'tool_agnet'; known are .*single_turn_agent, tool_agent"
    ):
        find_loop("tool_agnet")
    for path in ("no_such_module.Loop", ".Loop"):
        with pytest.raises(LoopError, match=f"the agent loop {path} cannot be imported"):
            find_loop(path)
    with pytest.raises(LoopError, match=f"{module}.Stranger is not a subclass of rally.loops.AgentLoopBase"):
        find_loop(f"{module}.Stranger")
    with pytest.raises(LoopError, match=f"there is no class Missing in {module}; correct the name of the agent loop"):
        find_loop(f"{module}.Missing")


def test_only_loops_can_be_registered() -> None:
    with pytest.raises(LoopError, match=r"Stranger is not a subclass of rally\.loops\.AgentLoopBase"):

        @register("stranger")  # type: ignore[type-var]
        class Stranger:
            pass


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: x", "must be a list of entries"),
        ("- name: x", "must be a list of entries with name and _target_, not {'name': 'x'}"),
        ("- {", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_broken_config_files_are_refused_in_words(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "agents.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LoopError) as refused:
        load_loop_config(path)
    assert words in str(refused.value) and str(path) in str(refused.value)


async def failure(codec: ChatCodec, cls: Any, **options: Any) -> str:
    episode = (await hold(with_loop(codec, cls, **options))).episode
    assert episode.stop_reason == "error"
    return episode.error or ""


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (Twice, {"wrod": "x"}, "LoopError: Twice cannot be made from rollout.agent_loop_config:"),
        (SingleTurnAgentLoop, {"hint": 1}, "LoopError: SingleTurnAgentLoop takes no option hint in agent_loop_config"),
    ],
)
async def test_wrong_options_are_refused_in_words(tiny: ChatCodec, cls: Any, options: Any, words: str) -> None:
    assert (await failure(tiny, cls, **options)).startswith(words)


def returning(**fields: Any) -> type[AgentLoopBase]:
    class Given(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
            return AgentLoopOutput(**{"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [1, 0], **fields})

    return Given


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_mask": [1], "response_logprobs": [0.0]}, "2 response_ids but 1 response_mask entries"),
        ({"response_logprobs": [-0.5]}, "2 response_ids but 1 response_logprobs entries"),
        ({}, "no response_logprobs, and the response_ids with response_mask 1 are not the sampled ones"),
        ({"response_mask": [2, 0], "response_logprobs": [0.0, 0.0]}, "values other than 0 (observed) and 1 (sampled)"),
    ],
)
async def test_outputs_that_do_not_fit_together_are_refused_in_words(tiny: ChatCodec, fields: Any, words: str) -> None:
    error = await failure(tiny, returning(**fields))
    assert error.startswith("LoopError: the agent loop returned") and words in error


async def test_a_mask_of_truth_values_is_a_mask(tiny: ChatCodec) -> None:
    held = await hold(with_loop(tiny, returning(response_mask=[True, False], response_logprobs=[-1.0, 0.0])))
    assert [type(m) for m in held.segment.response_mask] == [int, int]


@function_tool
async def search(query: str) -> str:
    """Finds nothing."""
    return "nothing"


async def choose(selection: list[str] | None) -> Held:
    tools = [calculator, search]
    codec = tiny_codec(tools, show_tools=True)
    script = [Reply(said(codec, "", ("calculator", {"expression": "1"}), ("search", {"query": "x"})))]
    extra = {} if selection is None else {"tool_selection": selection}
    return await hold(make_runner(codec, script, tools), make_task(extra_info=extra))


@pytest.mark.parametrize(
    ("selection", "statuses"),
    [
        (None, ["ok", "ok"]),
        (["search"], ["unknown_tool", "ok"]),
        ([], ["unknown_tool", "unknown_tool"]),
    ],
)
async def test_tool_selection_narrows_what_is_shown_and_what_runs(
    selection: list[str] | None, statuses: list[str]
) -> None:
    held = await choose(selection)
    shown = held.engine.codec.decode(held.engine.calls[0].prompt)
    names = ["calculator", "search"] if selection is None else selection
    assert [n for n in ("calculator", "search") if f'"name": "{n}"' in shown] == names
    assert [r.status for r in held.episode.tool_results] == statuses


async def test_an_unknown_tool_selection_is_named() -> None:
    assert "there is no tool 'serach'" in ((await choose(["serach"])).episode.error or "")


async def test_a_failure_of_the_engine_is_not_the_policys_fault() -> None:
    codec = tiny_codec()
    runner = with_loop(codec, Twice)
    generate = runner.engine.generate

    async def failing(prompt_ids: Any, params: Any, **more: Any) -> Any:
        if runner.engine.calls:
            raise RuntimeError("the kernel failed")
        return await generate(prompt_ids, params, **more)

    runner.engine.generate = failing
    episode = await runner.episode(make_job(), sampling_of(codec), None)
    assert episode.segments[0].sampled and episode.extra["fault"] == "infrastructure"
    assert episode.error == "EngineError: the engine failed: RuntimeError: the kernel failed"


@pytest.mark.parametrize("reward", [10**400, float("nan"), "0.5"])
@pytest.mark.parametrize("name", ["reward_score", "turn_rewards"])
async def test_a_loop_whose_reward_is_no_finite_number_fails_by_name(name: str, reward: object) -> None:
    class Odd(Twice):
        async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
            output = await super().run(sampling_params, **row_fields)
            setattr(output, name, reward if name == "reward_score" else [0.1, reward])
            return output

    codec = tiny_codec()
    episode = await with_loop(codec, Odd).episode(make_job(), sampling_of(codec), None)
    assert "the agent loop returned the reward" in str(episode.error) and "return a finite number" in str(episode.error)
