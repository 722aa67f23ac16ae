"""The main function of a reward worker process. It runs one request at a time and exits at a deadline.

The first line on stdin is the spec; the answer is `{"needs_ids": bool}` or `{"error": sentence}`. Each further line is
a request, each answer a Score. The deadline covers only the function. It is enforced by faulthandler's C thread, which
needs no GIL, so a runaway regular expression cannot block it; the traceback is written to stderr. The process exits at
the end of stdin, also when its parent dies; if it hangs or is stopped then, the kernel kills it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, BinaryIO, NamedTuple

from rally.rewards.custom_functions import load_reward_function
from rally.rewards.registry import RewardFunction
from rally.rewards.score import RewardError, Score, decode, describe, encode
from rally.util.process_guard import end_with_parent

STDIN, STDOUT, STDERR = 0, 1, 2


class Channels(NamedTuple):
    requests: BinaryIO
    answers: BinaryIO


def main() -> None:
    end_with_parent()
    channels = _take_channels()
    faulthandler.enable()
    hello = decode(channels.requests.readline())
    faulthandler.dump_traceback_later(hello["load_timeout"], exit=True, file=STDERR)
    try:
        function = load_reward_function(**hello["spec"])
    except RewardError as error:
        channels.answers.write(encode({"error": str(error)}))
        return
    finally:
        faulthandler.cancel_dump_traceback_later()
    channels.answers.write(encode({"needs_ids": getattr(function, "needs_ids", False)}))
    with asyncio.Runner() as runner:  # one event loop for all requests, so that an async function can keep its client
        for line in channels.requests:
            _truncate_stderr()
            score = _run(function, decode(line), hello["timeout"], runner)
            sys.stderr.flush()
            channels.answers.write(encode(asdict(score)))


def _take_channels() -> Channels:
    """Move the protocol off stdin and stdout, so that a function that prints or reads cannot disturb it."""
    channels = Channels(os.fdopen(os.dup(STDIN), "rb"), os.fdopen(os.dup(STDOUT), "wb", buffering=0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    os.dup2(STDERR, STDOUT)
    sys.stdout = sys.stderr
    return channels


def _truncate_stderr() -> None:
    """Empty stderr, which is a file, so that it has the output of one request only and does not grow."""
    os.lseek(STDERR, 0, os.SEEK_SET)
    os.ftruncate(STDERR, 0)


def _run(function: RewardFunction, request: Mapping[str, Any], timeout: float, runner: asyncio.Runner) -> Score:
    faulthandler.dump_traceback_later(timeout, exit=True, file=STDERR)
    start = time.perf_counter()
    try:
        value = function(**request)
        if inspect.isawaitable(value):
            value = runner.run(_finish(value))
        return Score.of(value, time.perf_counter() - start)
    except BaseException as error:  # noqa: BLE001 - user code: any failure, SystemExit included, is a result
        traceback.print_exc()
        return Score(error=describe(error), seconds=time.perf_counter() - start)
    finally:
        signal.alarm(0)  # cancels an alarm that the function left behind
        faulthandler.cancel_dump_traceback_later()


async def _finish(value: Any) -> Any:
    return await value
