"""A reward function asks a generative reward model that the run serves; failures are never a score of 0."""

import asyncio
import sys
from pathlib import Path

import pytest
from test_rewards_reward_model import EPISODES
from train_cases import Paper, run_config, write_model

from rally.chat.tiny_tokenizer import tiny_tokenizer
from rally.config.reward import JudgeRollout
from rally.rewards import RewardError, RewardSpec, Scorer
from rally.rewards.custom_functions import JudgeAddress, judge_arguments
from rally.rewards.judge_server import JudgeServer
from rally.runs.build.reward_model import judge_command
from rally.runs.train import train
from rally.track import RunFolder

JUDGE = '''
import aiohttp


async def compute_score(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer
):
    """In the form of verl's examples of generative reward models."""
    messages = [{"role": "user", "content": f"Rate this: {solution_str[:20]!r}"}]
    request = {"model": MODEL, "messages": messages, "temperature": 0.7, "top_p": 0.8, "max_tokens": 6}
    async with aiohttp.ClientSession() as session:
        url = f"http://{reward_router_address}/v1/chat/completions"
        async with session.post(url, json=request) as response:
            answer = await response.json()
    text = answer["choices"][0]["message"]["content"]
    return {"score": sum(map(ord, text)) % 10 / 10, "genrm_response": text}
'''


@pytest.mark.usefixtures("forked")
def test_two_steps_with_a_generative_reward_model_behind_a_real_server(
    home: Path, tmp_path: Path, paper: Paper
) -> None:
    judge = write_model(tmp_path / "judge", seed=7)
    function = tmp_path / "judge_reward.py"
    function.write_text(f"MODEL = {str(judge)!r}\n{JUDGE}", encoding="utf-8")
    keys = [
        "reward.reward_model.enable=True",
        "reward.reward_model.enable_resource_pool=True",
        "reward.reward_model.n_gpus_per_node=8",
        "reward.reward_model.nnodes=1",
        f"reward.reward_model.model_path={judge}",
        "reward.reward_model.rollout.name=rally",
        "reward.reward_model.rollout.prompt_length=200",
        "reward.reward_model.rollout.response_length=56",
        f"custom_reward_function.path={function}",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "data.val_files=null",
    ]
    train(run_config(home, tmp_path / "run", *keys), paper.console)
    run = RunFolder(tmp_path / "run")
    metrics = [row.metrics for row in run.read_metrics() if row.step]
    assert len(metrics) == 2 and all(row["failures/reward"] == 0 and row["reward/missing"] == 0 for row in metrics)
    episodes = [one for step in (1, 2) for one in run.read_episodes(step)]
    answers = {str(one.reward_info["genrm_response"]) for one in episodes}
    assert len(episodes) == 24 and len(answers) > 1, "the judge's answers are recorded"
    assert len({one.reward for one in episodes}) > 1
    assert "rally.cli serve engine" in (tmp_path / "run" / "servers" / "reward_model.log").read_text()


def test_a_server_that_has_ended_makes_every_score_an_error(tmp_path: Path) -> None:
    """Also where the function itself turns the failure into a 0."""
    path = tmp_path / "silent.py"
    path.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info, **kw):\n    return 0.0\n")
    serve = "import http.server as h, sys; h.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).handle_request()"
    handler = (
        "class H(__import__('http.server').server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
    )
    script = tmp_path / "server.py"
    script.write_text(handler + serve)
    server = JudgeServer(command=lambda port: [sys.executable, str(script), str(port)], log=tmp_path / "log" / "s.log")
    spec = RewardSpec(path=str(path), judge=JudgeAddress(address=server.address))

    async def score() -> str | None:
        async with Scorer(spec, 1, 20.0, server=server) as scorer:
            while server.problem() is None:  # it answers one request
                await asyncio.sleep(0.05)
            return (await scorer.score(EPISODES[0])).error

    assert "the server of the reward model has ended" in str(asyncio.run(score()))


def test_a_server_that_does_not_start_or_answer_is_reported(tmp_path: Path) -> None:
    dead = JudgeServer(
        command=lambda port: [sys.executable, "-c", "raise SystemExit('no model')"], log=tmp_path / "a" / "l"
    )
    with pytest.raises(RewardError, match=r"(?s)ended while it was starting.*no model"):
        asyncio.run(dead.start())
    asyncio.run(dead.close())
    nobody = JudgeServer(url="http://127.0.0.1:9", start_seconds=0.2)
    with pytest.raises(RewardError, match=r"does not answer .*correct reward_model.server.url"):
        asyncio.run(nobody.start())


def test_the_tokenizer_of_the_judge_is_loaded_when_it_is_used(home: Path) -> None:
    arguments = judge_arguments(JudgeAddress(address="127.0.0.1:1", tokenizer=str(home / "model")))
    assert arguments["reward_router_address"] == "127.0.0.1:1"
    tokenizer, own = arguments["reward_model_tokenizer"], tiny_tokenizer()
    assert tokenizer("2+3")["input_ids"] == own("2+3")["input_ids"] and len(tokenizer) == len(own)
    assert tokenizer.decode([5, 6]) == own.decode([5, 6])


def test_the_server_is_called_by_the_name_that_requests_use() -> None:
    command = judge_command("some/model", "python", JudgeRollout(max_model_len=77), 1234)
    assert command[:6] == ["python", "-m", "rally.cli", "serve", "engine", "some/model"]
    assert command[command.index("--name") + 1] == "some/model"
    assert command[command.index("--max-model-len") + 1] == "77"
    with pytest.raises(RewardError, match=r"name=sglang needs sglang, which .* lacks; set reward_model.server.python"):
        judge_command("some/model", sys.executable, JudgeRollout(name="sglang"), 1234)
