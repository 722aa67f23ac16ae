"""The independent scorers of environments: the same result as the recorded rewards, from the recorded texts alone."""

import json
from pathlib import Path

import pytest
from loop_cases import Reply, hold, make_runner, said

from rally.chat import ChatCodec, tiny_tokenizer
from rally.config import load_config
from rally.runs.build.data import environments_of
from rally.track import RunFolder
from rally.types import Task

CODEC = ChatCodec(tiny_tokenizer(), "hermes")
LOOP = {"loop": "env_agent", "prompt_length": 3000, "response_length": 1000}


async def test_reasoning_gym_is_scored_again_from_seeds_and_replies(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    from benchmarks.score_reasoning_gym import report
    from rally.envs.adapters.reasoning_gym import make

    args = {"chain_sum": {"scoring": "strict", "max_terms": 3}, "gcd": {"scoring": "strict"}}
    mixture = [{"name": f"reasoning_gym/{n}", "label": f"some/{n}", "args": a} for n, a in args.items()]
    config = load_config(overrides=[f"env.mixture={json.dumps(mixture)}"])
    folder = RunFolder(tmp_path).create()
    folder.save_config(config.to_yaml())
    episodes = []
    for name, settings in args.items():
        for seed in (5, 6):
            known = make(name, **settings)  # type: ignore[arg-type]
            known.reset({}, seed)
            right = known.entry["answer"]  # type: ignore[attr-defined]
            for text in (f"<answer>1</answer> no, <answer>{right}</answer>", f"<answer>{right} or so</answer>", right):
                runner = make_runner(CODEC, [Reply(said(CODEC, text))], environments=environments_of(config), **LOOP)
                row = {"env": f"some/{name}", "id": f"{name}{seed}{text}", "seed": seed}
                episodes.append((await hold(runner, Task(id=row["id"], data_source="", prompt=(), row=row))).episode)
    assert [e.reward for e in episodes] == [1.0, 0.0, 0.0] * 4
    folder.log_episodes(0, episodes, validate=True)
    [file] = (folder.path / "episodes").glob("val_*.jsonl")
    lines = [line.split() for line in report(folder.path, [file]).splitlines()]
    assert lines[1:] == [
        ["some/chain_sum", "6", "33.3%", "33.3%", "33.3%", "0"],
        ["some/gcd", "6", "33.3%", "33.3%", "33.3%", "0"],
        ["all", "of", "some", "12", "33.3%", "33.3%", "33.3%", "0"],
    ]
    claimed = [{**json.loads(line), "reward": 1.0} for line in file.read_text().splitlines()]
    file.write_text("\n".join(map(json.dumps, claimed)))
    assert report(folder.path, [file]).splitlines()[-1].split()[-1] == "8", "recorded rewards that the package denies"


async def test_bfcl_is_scored_again_from_the_recorded_calls(tmp_path: Path) -> None:
    bfcl = pytest.importorskip("bfcl_eval") and __import__("rally.envs.adapters.bfcl", fromlist=["bfcl"])
    from benchmarks.score_bfcl import right

    config = load_config(overrides=["env.name=bfcl/simple_python"])
    row = bfcl.make("simple_python").tasks()[0]
    ((name, accepted),) = bfcl._truths("simple_python")[row["entry"]][0].items()
    call = (name, {key: values[0] for key, values in accepted.items() if values[0] != ""})
    for calls, wanted in (([call], 1.0), ([call, call], 0.0), ([], 0.0)):
        runner = make_runner(CODEC, [Reply(said(CODEC, "", *calls))], environments=environments_of(config), **LOOP)
        task = Task(id="a", data_source="", prompt=(), row={"env": "bfcl/simple_python", "id": "a", "seed": 0})
        episode = (await hold(runner, task)).episode
        folder = RunFolder(tmp_path / str(len(calls))).create()
        folder.log_episodes(0, [episode], validate=True)
        [file] = (folder.path / "episodes").glob("val_*.jsonl")
        assert episode.reward == wanted == right(json.loads(file.read_text()), "simple_python", 0)
