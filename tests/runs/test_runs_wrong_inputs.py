"""A user's mistake in any input file is one sentence, whatever types and tags the file has."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from track.track_episodes import make_episode

from rally.chat import tiny_tokenizer
from rally.chat.templates import QUESTION, Template, TemplateError
from rally.config import ConfigError, load_config, load_sft_config
from rally.data import DataError, load_tasks
from rally.data.row_files import read_rows
from rally.importing import ImportFailed, import_file
from rally.interactions import Interactions
from rally.interactions.loader import load_interactions
from rally.loops.registry import load_loop_config
from rally.replay.replay import find_episode
from rally.tools import ToolConfigError, load_tools
from rally.tools.loader import load_function_tools
from rally.tools.mcp.config import McpSettings, read_servers
from rally.track import RunFolder
from rally.track.run_folder.episode_json import episode_to_json
from rally.types import RallyError, Task

TAGS = ("!!int x", "!!float x", "!!bool x", "!!timestamp x", f"1{'0' * 5000}")


@pytest.mark.drill("reliability", "A value in a YAML file does not fit its tag, or has 5000 digits", "One sentence")
@pytest.mark.parametrize("value", TAGS, ids=["int", "float", "bool", "timestamp", "digits"])
def test_a_value_that_its_tag_does_not_fit_is_a_sentence(tmp_path: Path, value: str) -> None:
    path = tmp_path / "x.yaml"
    readers: list[Callable[[], Any]] = [
        lambda: load_config(path),
        lambda: load_sft_config(path),
        lambda: load_tools(path),
        lambda: load_interactions(path),
        lambda: load_loop_config(path),
        lambda: load_config(overrides=[f"trainer.seed={value}"]),
    ]
    for read in readers:
        path.write_text(f"tools: {value}\n")
        with pytest.raises(RallyError) as error:
            read()
        assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_numbers_that_python_does_not_print_and_names_with_a_nul_are_sentences(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for text, words in ((f"trainer: {{seed: 0x{'f' * 5000}}}", "a number of more than"), ('base: "a\\0b"', "base is")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_config(path)
    with pytest.raises(ConfigError, match="a number of more than"):
        load_config(overrides=[f"trainer.seed=0x{'f' * 5000}"])


PLAIN = "tools: [{name: calculator, %s}]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tools: [{name: [a]}]", "is not a built-in tool"),
        ("tools: [{class_name: [a]}]", "must be written as package.module.Class"),
        ("tools: [{class_name: ..}]", "must be written as package.module.Class"),
        ("tools: [{5: 1, a: 2}]", "unknown key '5'"),
        (PLAIN % "config: {precision: 3}", "has no settings, so config has no key 'precision'"),
        (PLAIN % "process: {memory_mb: true}", "process must be true, false or"),
        (PLAIN % "description: [x]", "the description of tool 'calculator' must be a text"),
        (PLAIN % "parameters: {properties: {a: 5}}", "the parameter a of tool 'calculator' must be a JSON schema"),
        (PLAIN % "parameters: {properties: {a: {}}, required: 7}", "required of tool 'calculator' must be a list"),
    ],
)
def test_mistakes_in_a_tool_yaml_are_sentences(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "tools.yaml").write_text(text)
    with pytest.raises(ToolConfigError, match=words):
        load_tools(tmp_path / "tools.yaml", processes=True)


def test_mistakes_in_other_files_of_names_are_sentences(tmp_path: Path) -> None:
    users = tmp_path / "users.yaml"
    for text in ("interaction: [{name: [a]}]", "interaction: [{name: gsm8k, 7: 8, zz: 9}]", "interaction: [{name: 5}]"):
        users.write_text(text)
        with pytest.raises(RallyError, match="entry 1"):
            load_interactions(users)
    task = Task(id="t", data_source="d", prompt=(QUESTION,), interaction_kwargs={"name": ["a"]})
    with pytest.raises(RallyError, match=r"names the interaction \['a'\]"):
        Interactions([]).find(task)
    (tmp_path / "mcp.json").write_text("[" * 50_000)
    with pytest.raises(ToolConfigError, match="is not valid JSON"):
        read_servers(McpSettings(mcp_servers_config_path=str(tmp_path / "mcp.json")), tmp_path)


@pytest.mark.drill("reliability", "A user's module calls sys.exit when it is imported", "One sentence with its code")
def test_a_module_that_exits_is_a_sentence(tmp_path: Path) -> None:
    for code in ("import sys; sys.exit(4)", "raise GeneratorExit"):
        (tmp_path / "user_module.py").write_text(code)
        with pytest.raises(ImportFailed, match=r"SystemExit: 4|GeneratorExit"):
            import_file(tmp_path / "user_module.py", "test")
    (tmp_path / "user_module.py").write_text("import atexit, sys, time\natexit.register(time.sleep, 0.3)\nsys.exit(4)")
    with pytest.raises(ToolConfigError, match=r"user_module\.py cannot be imported: SystemExit: 4"):
        load_function_tools(tmp_path / "user_module.py", processes=True)


ROW = {"data_source": "d", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}


def test_a_column_that_python_cannot_hold_is_a_sentence(tmp_path: Path) -> None:
    marked = pa.field("x", pa.int64(), metadata={b"rally": b"json"})
    offsets = pa.py_buffer((0).to_bytes(4, "little") + (2).to_bytes(4, "little"))
    columns = {
        "twice the same key": pa.table({"x": pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))}),
        "too long": pa.table({"x": pa.array([2**62], pa.duration("s"))}),
        "no UTF-8": pa.table({"x": pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff\xfe")])}),
        "no JSON": pa.table([pa.array([5])], schema=pa.schema([marked])),
    }
    for name, table in columns.items():
        pq.write_table(table, tmp_path / "x.parquet")
        with pytest.raises(DataError, match="the column x"):
            assert list(read_rows(tmp_path / "x.parquet")), name
        with pytest.raises(DataError):
            load_tasks(tmp_path / "x.parquet").validate()


def test_keywords_for_a_tool_that_are_no_mapping_are_a_sentence(tmp_path: Path) -> None:
    """At the run they would fail in `create`, and be taken for an outage of the tool."""
    row = {**ROW, "extra_info": {"tools_kwargs": {"calculator": {"create_kwargs": 5}}}}
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"extra_info\.tools_kwargs\.calculator\.create_kwargs is 5"):
        load_tasks(tmp_path / "x.jsonl").validate()


def test_a_template_that_becomes_invalid_python_is_a_sentence() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% break %}"
    with pytest.raises(TemplateError, match="outside loop"):
        Template(tokenizer, [], None, {}).raw_text([QUESTION], True)


@pytest.mark.drill("reliability", "A recorded episode has fields of other types", "Its reader answers with a sentence")
def test_an_episode_with_fields_of_other_types_is_a_sentence(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run").create()
    name = "t000001-00000-0"
    run.log_episodes(1, [make_episode(name)])
    good = episode_to_json(run.read_episodes(1)[0])
    file = next((run.path / "episodes").glob("*.jsonl"))
    wrong: tuple[tuple[tuple[str | int, ...], Any], ...] = (
        (("extra",), None),
        (("timings",), -1),
        (("reward_info",), "x"),
        (("task", "prompt"), "x"),
        (("task", "prompt", 0), None),
        (("task", "prompt", 0), {}),
        (("task", "extra_info"), []),
        (("segments", 0, "prompt_ids"), "x"),
        (("segments", 0, "prompt_ids", 0), -1),
        (("segments", 0, "response_ids", 0), {}),
        (("turns", 0, "text"), [None]),
    )
    for path, value in wrong:
        changed = json.loads(json.dumps(good))
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        file.write_text(json.dumps(changed) + "\n")
        with pytest.raises(RallyError, match="damaged"):
            find_episode(RunFolder(run.path), name)
    shutil.rmtree(run.path)
