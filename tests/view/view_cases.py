"""A realistic small run on disk, a viewer over it, and texts that try to inject markup."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import uvicorn

from benchmarks.browser import Browser
from rally.chat import ChatCodec, tiny_tokenizer
from rally.track import AdvantageSpan, RunFolder
from rally.types import (
    Episode,
    Generation,
    Segment,
    StopReason,
    Task,
    ToolCall,
    ToolResponse,
    ToolResult,
    ToolStatus,
    Turn,
    WeightSpan,
)
from rally.view.run_data import RunData, open_runs
from rally.view.server import create_app

BEGAN = 1_763_200_000.0
NASTY = (
    "<script>window.acted=1</script><img src=x onerror='window.acted=1'><svg/onload=window.acted=1>"
    "</script><!--<script>\x1b[31mred\x1b[0m \u202eevil\u202c 👩\u200d🚀 مرحبا שלום \u2028 &lt;b&gt; \x07\x00"
)


def make_episode(codec: ChatCodec, step: int, prompt: int, sample: int, *, validate: bool = False) -> Episode:
    """One call of the calculator and an answer; every other sample is wrong, and every third call fails."""
    kind = "v" if validate else "t"
    good, failed = sample % 2 == 0, sample % 3 == 2
    question = f"What is {prompt}*{prompt + 1}?"
    call = ToolCall(name="calculator", arguments={"expression": f"{prompt}*{prompt + 1}"}, id="call_0")
    status = ToolStatus.ERROR if failed else ToolStatus.OK
    result = ToolResult(
        call=call, status=status, response=ToolResponse(text=str(prompt * prompt + prompt)), seconds=0.02
    )
    said = [f'<tool_call>{{"name": "calculator"}}</tool_call> {sample}', f"#### {prompt * prompt + prompt + 1 - good}"]
    ids = [codec.encode_assistant({"role": "assistant", "content": text}) for text in said]
    told = codec.encode_delta([{"role": "tool", "content": result.response.text}])
    segment = Segment(prompt_ids=codec.encode_prompt([{"role": "user", "content": question}]))
    segment = (
        segment.append_sampled(_generation(ids[0], step))
        .append_observed(told)
        .append_sampled(_generation(ids[1], step))
    )
    first, second = len(ids[0]), len(ids[0]) + len(told)
    times = {"queued": 0.01, "first_token": 0.05}
    turns = (
        Turn(
            role="assistant",
            text=said[0],
            end=first,
            tool_calls=(call,),
            finish="stop",
            started=0.0,
            seconds=0.5,
            **times,
        ),
        Turn(role="tool", text="", start=first, end=second, tool_results=(result,), started=0.5, seconds=0.02),
        Turn(
            role="assistant",
            text=said[1],
            start=second,
            end=second + len(ids[1]),
            finish="stop",
            started=0.6,
            seconds=0.2,
        ),
    )
    return Episode(
        id=f"{kind}{step:06d}-{prompt:05d}-{sample}",
        group=f"{kind}{step:06d}-{prompt:05d}",
        task=Task(
            id=f"{kind}:{prompt}",
            data_source="sums",
            prompt=({"role": "user", "content": question},),
            ground_truth=str(prompt * prompt + prompt),
        ),
        stop_reason=StopReason.LENGTH if sample == 3 else StopReason.STOP,
        segments=(segment,),
        turns=turns,
        reward=float(good),
        step=step,
        validate=validate,
        seed=2**62 + sample,
        timings={"started": BEGAN + 10 * step, "total": 0.8, "score": 0.01},
    )


def _generation(ids: tuple[int, ...], version: int) -> Generation:
    logprobs = tuple(-0.5 * (n % 5) for n in range(len(ids)))
    return Generation(ids=ids, logprobs=logprobs, finish="stop", spans=(WeightSpan(version, 0, len(ids)),))


def write_step(folder: RunFolder, codec: ChatCodec, step: int, prompts: int = 3, samples: int = 4) -> list[Episode]:
    """Everything that a training step writes."""
    episodes = [make_episode(codec, step, prompt, sample) for prompt in range(prompts) for sample in range(samples)]
    folder.log_episodes(step, episodes)
    folder.log_advantages(step, {e.id: [_spans(e)] for e in episodes})
    began = BEGAN + 10 * step
    for phase, start, end in (("gen", 0.0, 1.0), ("update_actor", 1.0, 1.5)):
        folder.log_phase(step, phase, began + start, began + end)
    reward = sum(e.reward or 0.0 for e in episodes) / len(episodes)
    folder.log_metrics(step, {"critic/rewards/mean": reward, "num_turns/mean": 4.0, "actor/entropy": 1.0 / step})
    return episodes


def _spans(episode: Episode) -> list[AdvantageSpan]:
    value = 0.71 if episode.reward else -0.71
    return [AdvantageSpan(value, s.start, s.end) for s in episode.segments[0].spans]


def write_run(path: Path, steps: int = 2) -> Path:
    """Training steps 1 to `steps`, and a validation of the same tasks before the first and after the last."""
    tokenizer = tiny_tokenizer()
    codec, folder = ChatCodec(tokenizer), RunFolder(path).create()
    tokenizer.save_pretrained(path / "start")
    folder.save_config(f"actor_rollout_ref:\n  model:\n    path: {path / 'start'}\n")
    for step in (0, steps):
        tests = [make_episode(codec, step, prompt, int(step == 0), validate=True) for prompt in range(3)]
        folder.log_episodes(step, tests, validate=True)
    for step in range(1, steps + 1):
        write_step(folder, codec, step)
    return path


def nasty_episode(text: str) -> Episode:
    """Every text of an episode is this one, or its beginning where texts are usually short."""
    short, base = text[:300], make_episode(ChatCodec(tiny_tokenizer()), 3, 0, 0)
    call = ToolCall(name=short, arguments={short: short}, id=short, raw=short)
    result = ToolResult(call=call, status=ToolStatus.OK, response=ToolResponse(text=text), metrics={short: short})
    turns = (replace(turn, text=text, tool_results=(result,) if turn.role == "tool" else ()) for turn in base.turns)
    return replace(
        base,
        id=short,
        group=short,
        task=Task(id=short, data_source=short, prompt=({"role": "user", "content": text},), ground_truth=text),
        turns=tuple(turns),
        reward_info={short: short},
        extra={short: short},
        error=short,
        stop_reason=StopReason.ERROR,
    )


def go(browser: Browser, url: str, ready: str) -> None:
    """Opens a link in a fresh page, without state of the last one."""
    browser.open("about:blank")
    browser.open(url)
    browser.wait(f"!!document.querySelector({json.dumps(ready)})")


@contextmanager
def served(*paths: Path, token: str | None = None) -> Iterator[str]:
    """The address of a viewer over these runs."""
    runs: list[RunData] = open_runs(paths)
    for run in runs:
        run.indexer.catch_up()
    server = uvicorn.Server(uvicorn.Config(create_app(runs, token), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join()
