"""`AgentTrainer`: rows, tools and a reward as objects make the run that their files make."""

import asyncio
import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from train_cases import Paper

import rally
from rally.api import AgentTrainer, TrainerError
from rally.config import load_config
from rally.data import DataError, load_tasks
from rally.importing import ImportFailed, import_file, import_path
from rally.rewards.custom_functions import load_reward_function
from rally.runs.train import train
from rally.tools.function_tool import FunctionTool
from rally.tools.loader import load_function_tools
from rally.track import RunFolder
from rally.train.interrupt_signals import RunStopped

AGENT = '''
from rally.tools import function_tool
from rally.tools.builtin.calculator import calculate


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: such as 12*34+56
    """
    return calculate(expression)


@function_tool(name="double", example={"number": 2})
def twice(number: int) -> str:
    """Doubles a number."""
    return str(2 * number)


def reward(data_source, solution_str, ground_truth, extra_info=None, api_key=None):
    return {"score": (sum(map(ord, solution_str)) % 7) / 7, "level": extra_info["level"], "truth": len(ground_truth)}


def right(completions, solution, **kwargs):
    return [float(c[-1]["content"] == s) for c, s in zip(completions, solution)]


def short(completions, completion_ids, **kwargs):
    return [-len(ids) for ids in completion_ids]


class Inner:
    def reward(self):
        return 0.0
'''
SMALL = {
    "data.train_batch_size": 3,
    "data.max_prompt_length": 32,
    "data.max_response_length": 24,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.max_turns": 2,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "reward.num_workers": 1,
    "trainer.total_training_steps": 1,
}
ROWS = [{"prompt": f"What is {i}+1?", "answer": str(i + 1), "level": i} for i in range(6)]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "my_small_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    import my_small_agent  # type: ignore[import-not-found]

    yield my_small_agent
    del sys.modules["my_small_agent"]


def test_a_run_from_python_is_that_of_its_files(home: Path, tmp_path: Path, agent: ModuleType) -> None:
    assert rally.AgentTrainer is AgentTrainer
    paper = Paper()
    trainer = AgentTrainer(
        home / "model",
        ROWS,
        agent.reward,
        tools=[agent.calculator, agent.twice],
        val_rows=ROWS[:2],
        out=tmp_path / "run",
        keys=SMALL,
        console=paper.console,
    )
    trainer.dry_run()
    assert '"name": "calculator"' in paper.text and '"name": "double"' in paper.text
    outcome = trainer.train()
    assert outcome.steps == 1 and outcome.metrics["val-core/rows/reward/mean@1"] > 0

    [task, *_] = load_tasks(trainer.config.data.train_files)
    assert task.prompt == ({"role": "user", "content": "What is 0+1?"},) and task.ground_truth == "1"
    assert task.extra_info == {"level": 0} and task.data_source == "rows"
    tools = load_function_tools(str(trainer.config.function_tool_path))
    assert [tool.name for tool in tools] == ["calculator", "double"]
    one, other = (tool.function.__globals__ for tool in tools if isinstance(tool, FunctionTool))
    assert one is other, "the tools of a file share its state"

    keys = [f"trainer.default_local_dir={tmp_path / 'files'}", "trainer.experiment_name=run"]
    train(load_config(tmp_path / "run" / "config.yaml", keys), Paper().console)
    ours, files = (RunFolder(tmp_path / name).read_metrics() for name in ("run", "files"))
    assert ours[-1].metrics["critic/rewards/mean"] == files[-1].metrics["critic/rewards/mean"]
    assert ours[-1].metrics["reward/truth/mean"] == 1

    again = AgentTrainer(home / "model", ROWS[1:], agent.reward, out=tmp_path / "run", keys=SMALL)
    assert again.config.data.train_files != trainer.config.data.train_files, "a resumed run tells that rows changed"


def test_reward_functions_in_the_form_of_trl(tmp_path: Path, agent: ModuleType) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1+1?"}], "solution": "2"}]
    made = AgentTrainer("m", rows, [agent.right, agent.short], reward_weights=[1, 0.1], out=tmp_path / "a")
    assert made.config.reward_manager_name == "batch"
    [task] = load_tasks(made.config.data.train_files)
    assert task.extra_info == {"solution": "2"} and task.ground_truth is None
    chosen = made.config.reward_function
    function: Any = load_reward_function(chosen.path, chosen.name, batch=True)
    request = {
        "data_source": "rows",
        "solution_str": "2",
        "ground_truth": None,
        "extra_info": {
            "solution": "2",
            "messages": [{"role": "user", "text": "1+1?"}, {"role": "assistant", "text": "2"}],
        },
        "prompt_messages": 1,
        "completion_ids": [5, 6],
    }
    assert asyncio.run(function([request]))["scores"] == [{"right": 1.0, "short": -2.0, "score": 0.8}]
    single = AgentTrainer("m", rows, agent.right, out=tmp_path / "b").config
    assert single.reward_manager_name == "batch"


def test_in_a_notebook_the_run_is_a_process(
    home: Path, tmp_path: Path, agent: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    async def cell() -> None:  # of a notebook, which runs inside an event loop
        trainer = AgentTrainer(home / "model", ROWS, agent.reward, val_rows=ROWS[:2], out=tmp_path / "run", keys=SMALL)
        outcome = trainer.train()
        assert outcome.steps == 1 and outcome.metrics["val-core/rows/reward/mean@1"] > 0

    async def interrupted() -> None:
        class Interrupting(io.StringIO):
            def write(self, text: str) -> int:
                if text.split()[:2] == ["step", "1/400"] and "^C" not in self.getvalue():
                    super().write("^C")
                    raise KeyboardInterrupt
                return super().write(text)

        keys = {**SMALL, "trainer.total_training_steps": 400}
        with redirect_stdout(Interrupting()), pytest.raises(RunStopped):
            AgentTrainer(home / "model", ROWS, agent.reward, out=tmp_path / "long", keys=keys).train()

    asyncio.run(cell())
    assert "step 1/1" in capfd.readouterr().out
    asyncio.run(interrupted())
    assert 0 < len(RunFolder(tmp_path / "long").read_metrics()) < 400


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from rally import AgentTrainer\nAgentTrainer('model', [])\n")
    with pytest.raises(ImportFailed, match=r"imports .*script.py.*make the AgentTrainer under if __name__"):
        import_file(script, "reward")


def test_a_module_without_a_guard_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unguarded.py").write_text("from rally import AgentTrainer\nAgentTrainer('model', [])\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportFailed, match=r"imports unguarded.*make the AgentTrainer under if __name__"):
        import_path("pkg://unguarded", "reward")


def test_a_program_of_a_package_is_imported_by_its_name(
    tmp_path: Path, agent: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ModuleType("__main__")
    program.__file__, program.__spec__ = str(tmp_path / "program.py"), ModuleSpec("my_package.program", None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    exec("def reward(data_source, solution_str, ground_truth, extra_info=None): return 0.0", vars(program))
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "program.py").write_text("")
    assert str(AgentTrainer("m", ROWS, program.reward, out=tmp_path).config.reward_function.path).startswith("pkg://")


def test_keys_of_a_section_leave_its_other_keys_and_contradictions_are_told(tmp_path: Path, agent: ModuleType) -> None:
    keys = {"actor_rollout_ref.rollout.multi_turn": {"max_assistant_turns": 3}, "trainer": {"total_training_steps": 1}}
    config = AgentTrainer("m", ROWS, agent.reward, tools=[agent.calculator], out=tmp_path / "a", keys=keys).config
    assert config.function_tool_path is not None and config.run_dir == tmp_path / "a"
    contradicting = {"trainer.default_local_dir": str(tmp_path / "b")}
    with pytest.warns(UserWarning, match=r"keys sets trainer.default_local_dir, so what the arguments"):
        config = AgentTrainer("m", ROWS, agent.reward, out=tmp_path / "a", keys=contradicting).config
    assert config.trainer.default_local_dir == str(tmp_path / "b")


def test_a_secret_that_the_process_of_a_notebook_would_not_get(
    tmp_path: Path, agent: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**SMALL, "custom_reward_function.reward_kwargs": {"api_key": "hunter2222"}}
    trainer = AgentTrainer("m", ROWS, agent.reward, out=tmp_path, keys=keys)

    async def cell() -> None:
        trainer.train()

    with pytest.raises(TrainerError, match=r"reward_kwargs.api_key has a secret.*os.environ"):
        asyncio.run(cell())


class Frame:
    """A data frame of polars, in part."""

    def __iter__(self) -> Iterator[list[str]]:
        return iter([["What is 0+1?"], ["1"]])

    def to_dicts(self) -> list[dict[str, Any]]:
        return ROWS[:1]


def test_rows_of_other_kinds(tmp_path: Path, agent: ModuleType) -> None:
    def task_of(rows: Any, reward: Any = agent.reward) -> Any:
        return next(iter(load_tasks(AgentTrainer("m", rows, reward, out=tmp_path).config.data.train_files)))

    for rows in (Frame(), pa.Table.from_pylist(ROWS[:1]), (row for row in ROWS[:1])):
        assert task_of(rows).ground_truth == "1"
    named = task_of([{"prompt": "?", "answer": "1", "data_source": "sums", "agent_name": "tool_agent"}])
    assert (named.data_source, named.agent_name, named.extra_info) == ("sums", "tool_agent", {})
    columns = task_of([{"prompt": "?", "solution": "2", "data_source": "sums"}], agent.right)
    assert columns.extra_info == {"solution": "2", "data_source": "sums"} and columns.data_source == "sums"
    with pytest.raises(DataError, match="images"):  # they are images of the prompt, and not of the reward function
        task_of([{"prompt": "?", "answer": "1", "images": ["a.png"]}])


def local(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 0.0


def trl(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"rows": []}, "there are no train rows"),
        (
            {"rows": [{**ROWS[0], "messages": []}]},
            "row 0 has messages, where a reward function gets that of the episode",
        ),
        ({"rows": [["a", "b"]]}, "row 0 is a list; give mappings with prompt and answer"),
        ({"rows": [{"question": "?", "answer": "1"}]}, "row 0 has no prompt, but question, answer"),
        ({"rows": [{"prompt": "?", "answer": float("nan")}]}, "row 0 has no answer, but prompt, answer"),
        ({"rows": [{"prompt": "?"}]}, "row 0 has no answer, but prompt"),
        ({"reward": [local, local]}, "several reward functions, or weights, need functions of completions"),
        ({"reward": [trl, trl], "reward_weights": [1.0]}, "there are 2 reward functions and 1 weights; give as many"),
        ({"reward": None}, "row 0 has no data_source, and there is no reward function"),
        ({"reward": lambda *args: 0.0}, "the reward function <lambda> must be a function at the top level of a file"),
        ({"tools": ["calculator"]}, "a tool str must be a function at the top level of a file"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(tmp_path: Path, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(TrainerError, match=problem):
        AgentTrainer("model", **{"rows": ROWS, "reward": local, "out": tmp_path, **arguments})


def test_a_function_of_a_prompt_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ModuleType("a_prompt")  # as __main__ of a notebook, it has no file
    monkeypatch.setitem(sys.modules, "a_prompt", prompt)
    exec("def reward(*args): return 0.0", vars(prompt))
    with pytest.raises(TrainerError, match=r"defined in a notebook or at a prompt.*%%writefile"):
        AgentTrainer("model", ROWS, prompt.reward, out=tmp_path)


def test_a_method_is_refused(tmp_path: Path, agent: ModuleType) -> None:
    with pytest.raises(TrainerError, match=r"reward function Inner.reward must be a function at the top level"):
        AgentTrainer("model", ROWS, agent.Inner.reward, out=tmp_path)
