"""Agent loops written for verl run unchanged, and training uses exactly the sampled tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from loop_cases import (
    PROMPT,
    Held,
    Reply,
    check_sampled_once,
    check_tiling,
    hold,
    make_runner,
    make_task,
    said,
)

from rally.chat import ChatCodec
from rally.compat.verl.agent_loops import sampling_keywords
from rally.loops import LoopError, LoopSpec
from rally.loops.registry import import_loop
from rally.types import StopReason

MESSAGES = """
import re
from verl.protocol import DataProto
from verl.workers.rollout.sglang_rollout.agent_loop.base import AgentLoopBase

class Adder(AgentLoopBase):
    def __init__(self, max_turns=4, edit=False, pad=0):
        self.max_turns, self.edit, self.pad = max_turns, edit, pad

    async def generate(self, llm_server, data: DataProto, **kwargs) -> DataProto:
        done = []
        for prompt in data.batch["prompt"]:
            history = prompt.copy()
            for _ in range(self.max_turns):
                answer = await llm_server.generate(prompts=[history], **kwargs)
                history.append({"role": "assistant", "content": answer["text"][0]})
                asked = re.search(r"add\\((\\d+),(\\d+)\\)", answer["text"][0])
                if asked is None:
                    break
                total = str(int(asked[1]) + int(asked[2]))
                history.append({"role": "tool", "name": "add", "content": total})
                if self.edit:
                    history[1] = {"role": "assistant", "content": "(thought)"}
            done.append(history + [{"role": "padding", "content": ""}] * self.pad)
        output = data.clone()
        output.batch["response"] = done
        return output

class Lost(AgentLoopBase):
    async def generate(self, llm_server, data, **kwargs):
        return data

class Flat(AgentLoopBase):
    async def generate(self, llm_server, data, **kwargs):
        await llm_server.generate(prompts=data.batch["prompt"][0], **kwargs)
"""

TOKENS = """
from typing import Any
from uuid import uuid4
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op

@register("hinting")
class Hinting(AgentLoopBase):
    def __init__(self, *args, hint="Think again.", keep=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.hint, self.keep = hint, keep

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        metrics, request = {}, uuid4().hex
        ask = self.server_manager.generate
        prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        with simple_timer("generate_sequences", metrics):
            first = await ask(request_id=request, prompt_ids=prompt, sampling_params=sampling_params)
        with simple_timer("tool_calls", metrics):
            hint = await self.apply_chat_template([{"role": "user", "content": self.hint}], remove_system_prompt=True)
        so_far, params = prompt + first.token_ids + hint, {**sampling_params, "logprobs": True}
        second = await ask(request_id=request, prompt_ids=so_far, sampling_params=params)
        response = first.token_ids + hint + second.token_ids
        mask = [1] * len(first.token_ids) + [0] * len(hint) + [1] * len(second.token_ids)
        cut = slice(None, self.keep)
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=response[cut], response_mask=mask[cut], num_turns=4, metrics=metrics
        )
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The modules of both kinds of loops, below the working folder."""
    names = {}
    for kind, text in (("messages", MESSAGES), ("tokens", TOKENS)):
        names[kind] = f"{kind}_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{names[kind]}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return names


async def held_by(codec: ChatCodec, path: str, texts: Sequence[str], options: Any = None, **settings: Any) -> Held:
    replies = [Reply(said(codec, text)) for text in texts]
    loops = {"mine": LoopSpec(import_loop(path), options or {})}
    task = make_task(row={"raw_prompt": list(PROMPT)})
    return await hold(make_runner(codec, replies, loop="mine", loops=loops, **settings), task)


async def test_a_loop_over_messages_is_trained_on_what_was_sampled(tiny: ChatCodec, files: Any) -> None:
    held = await held_by(tiny, f"{files['messages']}.Adder", ["so add(2,3)", "it is 5"], {"pad": 3})
    assert held.episode.error is None
    assert held.roles == ["assistant", "tool", "assistant"]
    assert [turn.text for turn in held.episode.turns] == ["so add(2,3)", "5", "it is 5"]
    first, second = held.engine.calls
    delta = tiny.encode_delta([{"role": "tool", "name": "add", "content": "5"}])
    assert second.prompt == (*first.prompt, *first.generation.ids, *delta), "the history is the segment itself"
    assert (held.episode.stop_reason, held.episode.num_turns) == (StopReason.STOP, 4)
    check_tiling(held.episode)
    check_sampled_once(held)


async def test_a_last_answer_of_a_tool_is_recorded_without_tokens(tiny: ChatCodec, files: Any) -> None:
    held = await held_by(tiny, f"{files['messages']}.Adder", ["add(1,1)"] * 9, {"max_turns": 2})
    assert held.roles == ["assistant", "tool", "assistant", "tool"]
    last = held.episode.turns[-1]
    assert (last.text, last.start) == ("2", last.end)
    check_sampled_once(held)


async def test_a_history_that_was_edited_opens_a_new_segment(tiny: ChatCodec, files: Any) -> None:
    held = await held_by(tiny, f"{files['messages']}.Adder", ["add(2,3)", "it is 5"], {"edit": True})
    before, after = held.episode.segments
    assert "(thought)" in tiny.decode(after.prompt_ids) and "(thought)" not in tiny.decode(before.ids)
    assert held.engine.calls[1].prompt == after.prompt_ids
    check_sampled_once(held)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_assistant_turns": 2}, StopReason.MAX_TURNS),
        ({"response_length": 30}, StopReason.LENGTH),
        ({"max_model_len": 60}, StopReason.CONTEXT),
    ],
)
async def test_the_limits_of_the_run_end_such_a_loop_too(
    tiny: ChatCodec, files: Any, settings: Any, reason: StopReason
) -> None:
    held = await held_by(tiny, f"{files['messages']}.Adder", ["add(1,1)"] * 40, {"max_turns": 40}, **settings)
    assert (held.episode.error, held.episode.stop_reason) == (None, reason)
    assert held.episode.turns
    check_sampled_once(held)


@pytest.mark.parametrize(
    ("name", "words"),
    [("Lost", "one history for each prompt in batch['response']"), ("Flat", "write prompts=[history]")],
)
async def test_a_loop_over_messages_that_goes_wrong_is_told_how(
    tiny: ChatCodec, files: Any, name: str, words: str
) -> None:
    held = await held_by(tiny, f"{files['messages']}.{name}", ["x"])
    assert words in str(held.episode.error)


@pytest.mark.parametrize("keep", [None, 40])
async def test_a_loop_over_tokens_may_tell_no_logprobs(tiny: ChatCodec, files: Any, keep: int | None) -> None:
    held = await held_by(tiny, f"{files['tokens']}.Hinting", ["yes", "no"], {"hint": "Sure?", "keep": keep})
    assert held.episode.error is None
    segment, (first, second) = held.segment, held.engine.calls
    sampled = [
        pair
        for *pair, mask in zip(segment.response_ids, segment.response_logprobs, segment.response_mask, strict=True)
        if mask
    ]
    whole = [[*pair] for c in (first, second) for pair in zip(c.generation.ids, c.generation.logprobs, strict=True)]
    assert sampled == whole[: len(sampled)] and sampled
    assert keep is not None or len(sampled) == len(whole)
    assert second.prompt[: len(first.prompt)] == first.prompt and "Sure?" in tiny.decode(second.prompt)
    assert held.episode.timings["tools"] > 0
    assert held.episode.extra["num_turns"] == 4


def test_a_penalty_is_not_dropped_with_what_is_always_so() -> None:
    assert sampling_keywords({"logprobs": True, "repetition_penalty": 1.0, "top_p": 0.9}) == {"top_p": 0.9}
    assert sampling_keywords({"repetition_penalty": 1.2}) == {"repetition_penalty": 1.2}


def test_a_module_that_has_no_stand_in_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wants_more.py").write_text("from verl.single_controller.base import Worker\n")
    with pytest.raises(LoopError, match=r"wants_more.Loop cannot be imported .*verl.single_controller"):
        import_loop("wants_more.Loop")


AT_ONCE = """
import asyncio
from verl.workers.rollout.sglang_rollout.agent_loop.base import AgentLoopBase

class Both(AgentLoopBase):
    async def generate(self, llm_server, data, **kwargs):
        [prompt] = data.batch["prompt"]
        told = await asyncio.gather(*(llm_server.generate(prompts=[prompt], **kwargs) for _ in range(2)))
        data.batch["response"] = [[*prompt, {"role": "assistant", "content": told[1]["text"][0]}]]
        return data

class Stubborn(AgentLoopBase):
    async def generate(self, llm_server, data, **kwargs):
        [history] = data.batch["prompt"]
        for _ in range(50):
            try:
                told = await llm_server.generate(prompts=[history], **kwargs)
                history += [{"role": "assistant", "content": told["text"][0]}, {"role": "user", "content": "Go on."}]
            except Exception:
                history = history[:1]
        raise AssertionError("a limit of the run was taken for an accident")
"""


@pytest.fixture
def at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"at_once_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(AT_ONCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


async def test_turns_that_are_asked_for_at_once_do_not_follow_each_other(tiny: ChatCodec, at_once: str) -> None:
    held = await held_by(tiny, f"{at_once}.Both", ["yes", "no"])
    assert held.episode.error is None
    for segment, call in zip(held.episode.segments, held.engine.calls, strict=True):
        assert (segment.prompt_ids, segment.response_ids) == (call.prompt, call.generation.ids)
    check_sampled_once(held)


async def test_a_loop_that_catches_everything_does_not_catch_its_limits(tiny: ChatCodec, at_once: str) -> None:
    held = await held_by(tiny, f"{at_once}.Stubborn", ["yes"] * 50, max_assistant_turns=2)
    assert (held.episode.error, held.episode.stop_reason) == (None, StopReason.MAX_TURNS)
    assert len(held.engine.calls) == 2


AS_VERL_HAS_IT = """
from uuid import uuid4
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class Single(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        messages = list(kwargs["raw_prompt"])
        media = await self.process_vision_info(messages)
        images, videos = media.get("images"), media.get("videos")
        prompt = await self.apply_chat_template(messages, images=images, videos=videos)
        said = await self.server_manager.generate(
            request_id=uuid4().hex,
            prompt_ids=prompt,
            sampling_params=sampling_params,
            image_data=images,
            video_data=videos,
        )
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=said.token_ids,
            response_mask=[1] * len(said.token_ids),
            response_logprobs=said.log_probs or None,
            routed_experts=said.routed_experts[:9] if said.routed_experts is not None else None,
            multi_modal_data=media,
            num_turns=2,
            metrics={},
        )
"""


async def test_a_loop_that_minds_images_and_experts_runs_on_text(
    tiny: ChatCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "as_verl_has_it.py").write_text(AS_VERL_HAS_IT)
    held = await held_by(tiny, "as_verl_has_it.Single", ["yes"])
    assert held.episode.error is None
    told = held.engine.calls[0].generation
    assert (held.segment.response_ids, held.segment.response_logprobs) == (told.ids, told.logprobs)
    loops = {"mine": LoopSpec(import_loop("as_verl_has_it.Single"), {})}
    seen = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    refused = await hold(make_runner(tiny, loop="mine", loops=loops), make_task(row={"raw_prompt": seen}))
    assert "the prompt contains images, which is not supported in loops written for verl" in str(refused.episode.error)
