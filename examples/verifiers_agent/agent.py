"""Plays a task of verifiers 0.4 with the policy, as a program of its own, and reports the taskset's reward.

PYTHON=/envs/verifiers/bin/python                      # an environment with verifiers==0.4.0; it needs no Rally
$PYTHON examples/verifiers_agent/agent.py rows my_taskset --out data/my_taskset.jsonl
rally train data.train_files=data/my_taskset.jsonl ... actor_rollout_ref.rollout.agent_loop_class=black_box \
    "actor_rollout_ref.rollout.agent_loop_config.command=[$PYTHON, examples/verifiers_agent/agent.py, play, my_taskset]"

`my_taskset` is the id of a taskset: a module that is importable from the working folder, or an installed package.
"""

import argparse
import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path

import verifiers.v1 as vf

sys.path[:0] = [os.getcwd(), str(Path(__file__).parent)]


def environment(taskset, harness):
    agent = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": taskset}, "agent": agent}))


def text_of(prompt):
    if prompt is None or isinstance(prompt, str):
        return [{"role": "user", "content": prompt or "Begin."}]
    return [m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in prompt]


def write_rows(taskset, out):
    """One row per task: the number of the task, and its prompt for the record."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w") as file:
        for index, task in enumerate(environment(taskset, "chat_harness").taskset):
            row = {"prompt": text_of(task.data.prompt), "data_source": f"verifiers/{taskset}", "index": index}
            file.write(json.dumps(row) + "\n")


async def play(taskset, harness, index):
    env = environment(taskset, harness)
    task = next(task for number, task in enumerate(env.taskset) if number == index)
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        return await env.run_episode(task, vf.ModelContext("policy", client))


def report(result):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["RALLY_EPISODE_URL"], json.dumps(result).encode(), headers)
    urllib.request.urlopen(request).close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["rows", "play"])
    parser.add_argument("taskset")
    parser.add_argument("--harness", default="chat_harness")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "rows":
        write_rows(options.taskset, options.out)
        return
    index = json.loads(os.environ["RALLY_TASK"])["index"]
    episode = asyncio.run(play(options.taskset, options.harness, index))
    if not episode.ok:  # failures are data in verifiers
        sys.exit(f"the episode of verifiers failed: {episode.last_error}")
    report({"reward": float(sum(trace.reward for trace in episode.traces)), "traces": len(episode.traces)})


if __name__ == "__main__":
    main()
