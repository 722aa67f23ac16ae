"""Plays an example of an environment of verifiers 0.1 with the policy, as a program of its own, and reports its reward.

PYTHON=/envs/verifiers01/bin/python                    # an environment with verifiers==0.1.14; it needs no Rally
$PYTHON examples/verifiers_agent/agent_0_1.py rows my_env --out data/my_env.jsonl
rally train data.train_files=data/my_env.jsonl ... actor_rollout_ref.rollout.agent_loop_class=black_box \
    "actor_rollout_ref.rollout.agent_loop_config.command=[$PYTHON, examples/verifiers_agent/agent_0_1.py, play, my_env]"

`my_env` is the id of an environment: a module with `load_environment` that is importable from the working folder, or an
installed package. Its tools, rubrics and multi-turn protocols are those of the environment.
"""

import argparse
import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path

import verifiers as vf
from verifiers.types import ClientConfig

sys.path.insert(0, os.getcwd())


def write_rows(environment, name, out):
    """One row per example: its number, and its prompt for the record."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w") as file:
        for index, example in enumerate(environment.get_dataset()):
            prompt = [{"role": m["role"], "content": m["content"]} for m in example["prompt"]]
            file.write(json.dumps({"prompt": prompt, "data_source": f"verifiers/{name}", "index": index}) + "\n")


def play(environment, index):
    client = ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", max_retries=0)
    example = environment.get_dataset()[index]
    results = asyncio.run(environment.generate([example], client=client, model="policy"))
    (output,) = results["outputs"]
    if output.get("error"):  # failures are data in verifiers, with the reward 0
        sys.exit(f"the episode of verifiers failed: {output['error']}")
    return {"reward": float(output["reward"]), "metrics": dict(output.get("metrics") or {})}


def report(result):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["RALLY_EPISODE_URL"], json.dumps(result).encode(), headers)
    urllib.request.urlopen(request).close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["rows", "play"])
    parser.add_argument("environment")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    environment = vf.load_environment(options.environment)
    if options.what == "rows":
        write_rows(environment, options.environment, options.out)
    else:
        report(play(environment, json.loads(os.environ["RALLY_TASK"])["index"]))


if __name__ == "__main__":
    main()
