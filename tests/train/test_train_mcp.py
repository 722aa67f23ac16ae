"""A whole run with the tools of an MCP server, whose process lives through the updates and ends with the run."""

import json
import os
import sys
from pathlib import Path

import mcp_server as drill
import pytest
from train_cases import Paper, run_config

from rally.runs.train import train
from rally.track import RunFolder

LOOP = """
from rally.loops.tool_agent import ToolAgentLoop
from rally.types import ToolCall

class Asks(ToolAgentLoop):
    async def run(self, sampling_params, **row):
        session = self.toolbox.open(self.task, self.context.episode_id)
        (result,) = await session.run([ToolCall(name="remember", arguments={"value": "x"})])
        output = await super().run(sampling_params, **row)
        output.extra_fields["pid"] = result.response.text.partition(":")[0]
        return output
"""


def test_one_server_serves_a_run_and_ends_with_it(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "asking_loop.py").write_text(LOOP)
    server = {"command": sys.executable, "args": ["-S", drill.__file__, "remember"]}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"drill": server}}))
    (tmp_path / "tools.yaml").write_text("tools: [{type: mcp, mcp_servers_config_path: servers.json}]")
    config = run_config(
        home,
        tmp_path / "run",
        "actor_rollout_ref.rollout.agent_loop_config.tools=null",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
        "actor_rollout_ref.rollout.agent_loop_class=asking_loop.Asks",
        "data.max_prompt_length=128",
        "data.val_files=null",
        "trainer.val_before_train=false",
        "trainer.total_training_steps=2",
    )
    train(config, Paper().console)
    episodes = [episode for step in (1, 2) for episode in RunFolder(tmp_path / "run").read_episodes(step)]
    (pid,) = {episode.extra["pid"] for episode in episodes}
    assert len(episodes) == 24
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
