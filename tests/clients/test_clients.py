"""Unmodified clients in an environment of their own (make test-clients) against the gateway and `rally serve engine`.

Each test runs one case of `benchmarks/client_cases.py` in that environment. The model has random weights, so a case
holds because the server keeps the promise of its API, not because the model does.
"""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import uvicorn
from served_cases import free_port
from small_models import full_logprobs

from benchmarks.client_cases import CASES, LM_EVAL_ROWS
from benchmarks.constrained_decoding import tiny_model
from rally.chat import ChatCodec, tiny_tokenizer
from rally.engines import EmbeddedEngine, EngineSettings
from rally.gateway import AgentClient, BlackBoxAgentLoop
from rally.loops import Job, LoopSettings, LoopSpec, Runner
from rally.models.token_masks import Grammars
from rally.services.admission import Served
from rally.services.engine import create_app
from rally.tools import ToolBox
from rally.types import SamplingParams, Task

pytestmark = pytest.mark.clients
ROOT = Path(__file__).resolve().parents[2]
QUIET = {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
QUIET |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
TOKENIZER = tiny_tokenizer()
CODEC = ChatCodec(TOKENIZER, "hermes")
MODEL = tiny_model(len(TOKENIZER) + 4)
ASK = [{"role": "user", "content": "Go"}]
_opened: list[AgentClient] = []
_started, _over = Event(), Event()
ServerAddress = tuple[str, str, str]


def agent(row: dict[str, Any], client: AgentClient) -> str:
    """An episode that lasts as long as the tests."""
    _opened.append(client)
    _started.set()
    _over.wait()
    return "over"


def made_engine() -> EmbeddedEngine:
    grammars = Grammars(TOKENIZER, len(TOKENIZER) + 4, CODEC.stop_ids)
    settings = EngineSettings(max_model_len=4096, max_num_seqs=8)
    return EmbeddedEngine(MODEL, settings, decode=CODEC.decode, grammars=grammars)


@pytest.fixture(scope="module")
def python() -> str:
    given = os.environ.get("RALLY_CLIENTS")
    if not given:
        pytest.skip("RALLY_CLIENTS names no environment with clients (make test-clients)")
    return str(Path(given) / "bin" / "python")


@pytest.fixture(scope="module")
def gateway() -> Iterator[ServerAddress]:
    loops = {"black_box": LoopSpec(BlackBoxAgentLoop, {"agent": f"{__name__}:agent"})}
    task = Task(id="t", data_source="s", prompt=tuple(ASK), agent_name="black_box", row={"prompt": ASK})

    async def play() -> None:
        engine = made_engine()
        runner = Runner(
            engine=engine, codec=CODEC, toolbox=ToolBox([]), settings=LoopSettings(response_length=10**6), loops=loops
        )
        try:
            job = Job(task=task, episode_id="e", group="g", seed=1)
            await runner.run([job], SamplingParams(max_tokens=600, stop_ids=CODEC.stop_ids))
        finally:
            await engine.close()

    thread = Thread(target=lambda: asyncio.run(play()), daemon=True)
    thread.start()
    assert _started.wait(60)
    (client,) = _opened
    yield client.base_url, client.api_key, client.model
    _over.set()
    thread.join()


@pytest.fixture(scope="module")
def served() -> Iterator[ServerAddress]:
    app = create_app(Served(engine=made_engine(), tokenizer=TOKENIZER, name="policy", tool_format="hermes"))
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}/v1", "none", "policy"
    server.should_exit = True
    thread.join()


def outcome(python: str, name: str, server: ServerAddress, **environment: str) -> str:
    """What a case printed about its result."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RALLY_CLIENTS")}
    command = [python, str(ROOT / "benchmarks" / "client_cases.py"), name, *server]
    done = subprocess.run(command, capture_output=True, text=True, env=own | QUIET | environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = json.loads(done.stdout.strip().splitlines()[-1])
    return str(line["result"])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.server])
def test_a_client_of_the_gateway(python: str, gateway: ServerAddress, name: str) -> None:
    assert outcome(python, name, gateway)


def test_completions_of_a_server(python: str, served: ServerAddress) -> None:
    assert outcome(python, "openai completions with echo, top_logprobs", served).endswith("tokens")


def test_error_classes_of_a_server(python: str, served: ServerAddress) -> None:
    assert outcome(python, "litellm error classes", served)


def test_lm_eval_gets_the_logprobs_of_the_model(python: str, served: ServerAddress, tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    scored = json.loads(outcome(python, "lm_eval loglikelihood", served, RALLY_TOKENIZER=str(tmp_path)))
    for row, found in zip(LM_EVAL_ROWS, scored, strict=True):
        for choice, logprob in zip(row["choices"], found, strict=True):
            context, whole = (TOKENIZER.encode(text) for text in (row["question"], row["question"] + choice))
            assert logprob == pytest.approx(sum(full_logprobs(MODEL, whole, len(context))), abs=1e-3)
