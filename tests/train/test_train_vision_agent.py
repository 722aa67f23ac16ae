"""A small vision-language model learns to request a part of its image, sees it, and answers: a whole episode through
the real loop, tool, engine and trainer, equal to the module's own forward."""

import asyncio

import pytest
import torch
from vision_cases import full_logprobs, make_codec, make_image, make_vision_model

from rally.chat import ChatCodec
from rally.engines import EmbeddedEngine
from rally.engines.embedded.settings import EngineSettings
from rally.images.loading import decoded, read_image
from rally.loops import Job, LoopSettings, Runner
from rally.models import attention
from rally.sft.training import SftSettings, conversation_row, sft_step
from rally.tools import ToolBox, load_tools
from rally.train.forward import logprobs
from rally.train.packing import Row, pack
from rally.train.policy import OptimizerSettings, Policy
from rally.types import Episode, SamplingParams, StopReason, Task

TOOLS = ToolBox(load_tools({"tools": [{"name": "image_zoom_in_tool"}]}))
IMAGE = make_image(1, 60, 60)
PART = read_image(decoded(IMAGE).crop((0, 0, 30, 40)))
ASKED = ({"role": "user", "content": [{"type": "image", "image": IMAGE}]},)
CALL = {"type": "function", "function": {"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 30, 40]}}}
SHOWN = [{"type": "image", "image": PART}, {"type": "text", "text": "The part [0, 0, 30, 40] of the image:"}]
CONVERSATION = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "image_zoom_in_tool", "content": SHOWN},
    {"role": "assistant", "content": "noise"},
]


async def hold(policy: Policy, codec: ChatCodec, sampling: SamplingParams) -> Episode:
    settings = EngineSettings(max_model_len=400, max_num_seqs=4, page_size=8)
    engine = EmbeddedEngine(policy.model, settings, num_pages=200)
    runner = Runner(
        engine=engine,
        codec=codec,
        toolbox=TOOLS,
        settings=LoopSettings(response_length=300),
        default_loop="tool_agent",
    )
    task = Task(id="t", data_source="noise", prompt=ASKED)
    [episode] = await runner.run([Job(task=task, episode_id="e", group="g", seed=1)], sampling)
    await engine.close()
    return episode


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "mistral3"])
def test_it_looks_closer(family: str) -> None:
    model, codec = make_vision_model(family), make_codec(family, tools=TOOLS.schemas())
    attention.install(model)
    policy, settings = Policy(model, OptimizerSettings(lr=5e-3), 40), SftSettings(batch_size=1)
    row = conversation_row(codec, CONVERSATION, settings)
    while sft_step(policy, [row], settings)["train/loss"] > 0.02:
        assert policy.schedule.last_epoch < 60, "it learns one conversation by heart in about 20 steps"
    episode = asyncio.run(hold(policy, codec, SamplingParams(temperature=0.7, stop_ids=codec.stop_ids, max_tokens=200)))
    [segment] = episode.segments
    assert episode.stop_reason is StopReason.STOP and [turn.role for turn in episode.turns][1:] == ["tool", "assistant"]
    assert [span.image for span in segment.images] == [IMAGE, PART]
    expected = torch.tensor(full_logprobs(model, segment.ids, len(segment.prompt_ids), segment.images, 0.7))
    sampled = torch.tensor(segment.response_mask) == 1
    assert float((torch.tensor(segment.response_logprobs) - expected)[sampled].abs().max()) < 1e-5
    trained = logprobs.token_logprobs(model, pack([Row.of(segment, 0)], model.device), 0.7).logp_M.detach()
    assert float((trained - expected[sampled]).abs().max()) < 1e-5
