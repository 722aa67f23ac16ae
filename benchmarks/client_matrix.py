"""Unmodified clients against the gateway and a model with random weights: which of them get what they ask for?

    python -m benchmarks.client_matrix [--python PATH_TO_ANOTHER_PYTHON ...]

Each case of `client_cases.py` runs in its own process, with the first interpreter that has its packages: clients with
conflicting dependencies may live in environments of their own. Prints a line of JSON for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.client_cases import CASES, Case
from benchmarks.constrained_decoding import tiny_model
from rally.chat import ChatCodec, tiny_tokenizer
from rally.engines import EmbeddedEngine, EngineSettings
from rally.gateway import AgentClient, BlackBoxAgentLoop
from rally.loops import Job, LoopSettings, LoopSpec, Runner
from rally.models.token_masks import Grammars
from rally.tools import ToolBox
from rally.types import SamplingParams, Task

SCRIPT = Path(__file__).with_name("client_cases.py")
SECONDS = 300.0
QUIET = {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
_pythons = [sys.executable]


def has_packages(python: str, case: Case) -> bool:
    program = f"from importlib.metadata import version; [version(p) for p in {case.packages!r}]"
    return subprocess.run([python, "-c", program], capture_output=True, check=False).returncode == 0


def outcome(name: str, case: Case, client: AgentClient) -> dict[str, Any]:
    """The line of one case."""
    if case.server:
        return {"case": name, "result": "not run: the gateway has no text completions"}
    python = next((python for python in _pythons if has_packages(python, case)), None)
    if python is None:
        return {"case": name, "result": f"not run: {', '.join(case.packages)} is not installed"}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | QUIET
    command = [python, str(SCRIPT), name, client.base_url, client.api_key, client.model]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False)
    if done.returncode:
        return {"case": name, "result": "failed", "error": done.stderr.strip().splitlines()[-1:]}
    line: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return line


def agent(row: dict[str, Any], client: AgentClient) -> str:
    for name, case in CASES.items():
        print(json.dumps(outcome(name, case, client)), flush=True)
    return "over"


async def play() -> None:
    tokenizer = tiny_tokenizer()
    codec, vocabulary = ChatCodec(tokenizer, "hermes"), len(tokenizer) + 4
    engine = EmbeddedEngine(
        tiny_model(vocabulary),
        EngineSettings(max_model_len=4096, max_num_seqs=8),
        decode=codec.decode,
        grammars=Grammars(tokenizer, vocabulary, codec.stop_ids),
    )
    runner = Runner(
        engine=engine,
        codec=codec,
        toolbox=ToolBox([]),
        settings=LoopSettings(response_length=1_000_000),
        loops={"clients": LoopSpec(BlackBoxAgentLoop, {"agent": "benchmarks.client_matrix:agent"})},
    )
    prompt = [{"role": "user", "content": "Go"}]
    task = Task(id="clients", data_source="clients", prompt=tuple(prompt), agent_name="clients", row={"prompt": prompt})
    try:
        sampling = SamplingParams(max_tokens=600, stop_ids=codec.stop_ids)
        (episode,) = await runner.run([Job(task=task, episode_id="clients", group="g", seed=1)], sampling)
    finally:
        await engine.close()
    assert episode.error is None, episode.error
    print(json.dumps({"requests": episode.extra["agent"]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", action="append", default=[], help="an interpreter with further clients")
    from benchmarks import client_matrix  # the module that the agent is found in

    client_matrix._pythons.extend(parser.parse_args().python)
    asyncio.run(play())


if __name__ == "__main__":
    main()
