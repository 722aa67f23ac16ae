"""GRPO for a tool agent in one file: rollout, reward, advantage, loss, optimizer step.

    make demo                                                          # makes runs/demo/start, the agent to train
    python examples/grpo_in_one_file.py --model runs/demo/start        # 20 steps on the CPU

The agent can call a calculator and mostly guesses instead. Only the right answer is rewarded, so it learns to call.

This is the algorithm of `rally train` on Rally's public API, without what makes that fast and safe: packed rows with
shared prompts, mini-batches, gradient checks, checkpoints, validation, failure policies, tool deadlines and metrics.

Shapes: B episodes of a batch, L tokens of the longest history, V vocabulary.
"""

import argparse
import asyncio
import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rally import RallyError, SamplingParams, Segment, Task
from rally.chat import ChatCodec
from rally.data import load_tasks, write_rows
from rally.engines import EmbeddedEngine, EngineSettings
from rally.models.load import load_model, load_tokenizer
from rally.recipes.arithmetic.data import rows as arithmetic_rows
from rally.rewards import compute_score
from rally.tools import load_tools
from rally.tools.builtin.calculator import calculate

GROUP = 8  # episodes of each prompt
MAX_TURNS, MAX_TOKENS = 3, 96
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
LEARNING_RATE = 5e-4


@dataclass(frozen=True)
class Episode:
    """One exchange: every token with its mask and logprob, and the reward of the whole."""

    segment: Segment
    reward: float


@dataclass(frozen=True)
class Agent:
    """The policy, the engine that samples from its weights, and the codec between messages and tokens."""

    model: PreTrainedModel
    engine: EmbeddedEngine
    codec: ChatCodec

    async def play(self, task: Task, seed: int) -> Episode:
        """The multi-turn loop: sample, run the tool calls, append their results, until the agent answers."""
        sampling = SamplingParams(max_tokens=MAX_TOKENS, stop_ids=self.codec.stop_ids)
        segment, text = Segment(prompt_ids=self.codec.encode_prompt(task.prompt)), ""
        for turn in range(MAX_TURNS):
            generation = await self.engine.generate(segment.ids, replace(sampling, seed=seed + turn))
            segment = segment.append_sampled(generation)  # mask 1: the policy wrote these tokens
            reply = self.codec.parse(generation.ids)
            text = reply.text
            if generation.finish != "stop" or not reply.tool_calls:
                break
            answers = [{"role": "tool", "content": run_tool(call.arguments)} for call in reply.tool_calls]
            segment = segment.append_observed(self.codec.encode_delta(answers))  # mask 0: the tool wrote these
        score = compute_score(task.data_source, text, task.ground_truth, {"last_turn": text})
        return Episode(segment, score["score"] if isinstance(score, dict) else score)


def run_tool(arguments: dict[str, str]) -> str:
    try:
        return calculate(str(arguments.get("expression")))
    except RallyError as problem:
        return f"error: {problem}"


def group_advantages(rewards: Tensor) -> Tensor:
    """How much better each episode was than the others of its prompt. [prompts, GROUP] -> [B]"""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return (centred / (rewards.std(dim=1, keepdim=True) + 1e-6)).flatten()


def token_logprobs(model: PreTrainedModel, ids_BL: Tensor) -> Tensor:
    """The log-probability of every token but the first, given all tokens before it. [B, L - 1]"""
    logits_BLV = model(input_ids=ids_BL[:, :-1]).logits.float()
    return torch.log_softmax(logits_BLV, dim=-1).gather(2, ids_BL[:, 1:, None]).squeeze(2)


def grpo_loss(model: PreTrainedModel, segments: list[Segment], advantages_B: Tensor) -> Tensor:
    """PPO's clipped objective over the sampled tokens, averaged over all of them."""
    ids_BL = pad_sequence([torch.tensor(s.ids) for s in segments], batch_first=True)  # causal: padding changes nothing
    mask_BL = per_token([s.response_mask for s in segments], segments).bool()
    old_BL = per_token([s.response_logprobs for s in segments], segments)  # as the engine recorded them
    ratio_BL = (token_logprobs(model, ids_BL) - old_BL).exp()
    clipped_BL = ratio_BL.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain_BL = torch.minimum(ratio_BL * advantages_B[:, None], clipped_BL * advantages_B[:, None])
    return -gain_BL[mask_BL].mean()


def per_token(values: list[tuple[float, ...]], segments: list[Segment]) -> Tensor:
    """One value per token that is predicted: 0 on the prompt, the given ones on the response. [B, L - 1]"""
    whole = [(0.0,) * (len(s.prompt_ids) - 1) + v for s, v in zip(segments, values, strict=True)]
    return pad_sequence([torch.tensor(w) for w in whole], batch_first=True)


async def train(agent: Agent, tasks: list[Task], steps: int, prompts: int, seed: int) -> list[float]:
    """GRPO. Returns the mean reward of each step."""
    optimizer = torch.optim.AdamW(agent.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    order, history = random.Random(seed), []
    for step in range(1, steps + 1):
        chosen = order.sample(tasks, prompts)
        seeds = itertools.count(seed + step * 1_000_000, MAX_TURNS)
        jobs = [agent.play(task, next(seeds)) for task in chosen for _ in range(GROUP)]
        episodes = await asyncio.gather(*jobs)
        rewards = torch.tensor([episode.reward for episode in episodes])
        with agent.engine.updating():  # the engine samples from these very weights: what it cached is now stale
            loss = grpo_loss(
                agent.model, [episode.segment for episode in episodes], group_advantages(rewards.view(prompts, GROUP))
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        history.append(float(rewards.mean()))
        print(f"step {step:2d}  reward {history[-1]:.3f}  loss {float(loss.detach()):+.4f}")
    await agent.engine.close()
    return history


def load_agent(model_path: Path) -> Agent:
    tokenizer, model = load_tokenizer(str(model_path)), load_model(str(model_path))
    tools = load_tools({"tools": [{"name": "calculator"}]})
    engine = EmbeddedEngine(model, EngineSettings(max_model_len=512))
    return Agent(model, engine, ChatCodec(tokenizer, "hermes", [tool.tool_schema for tool in tools]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/demo/start"), help="the agent before training")
    parser.add_argument("--data", type=Path, default=Path("data/arithmetic/train.parquet"), help="made if missing")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not options.data.exists():
        write_rows(arithmetic_rows(1024, options.seed, "train"), options.data)
    tasks = list(load_tasks(options.data))
    asyncio.run(train(load_agent(options.model), tasks, options.steps, options.prompts, options.seed))


if __name__ == "__main__":
    main()
