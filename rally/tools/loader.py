"""Loads the tools of a tool YAML or a Python file. A mistake raises one ToolConfigError that names the entry.

An entry is a class (`class_name`, with optional `config` and `tool_schema`) or a built-in tool (`name`, with optional
`description` and `parameters`, or the name as a string). An entry of `type: mcp` stands for all tools of MCP servers.

    tools:
      - class_name: my_tools.Lookup          # below the working folder, the YAML's folder, or installed
        config: {type: native, index: ./wiki}
        limits: {rate_limit: 20, timeout: 5} # see limits.py, for any tool
        process: {memory_mb: 4096}           # or true, false: whether a run gives it a process of its own
        on_outage: mask                      # or drop_group, count: what an episode gets when the tool is down
        timeout_counts: false                # true: a late call is the policy's fault, as of a program that loops
        tool_schema: {name: lookup, description: ..., parameters: {...}}
      - name: calculator
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rally.importing import (
    INSTALLED,
    ImportFailed,
    import_file,
    import_functions,
    import_module,
    look_in,
    of_installed_verl,
)
from rally.redact import learn_tree
from rally.tools.base import BaseTool
from rally.tools.builtin.answer_check import Geo3kTool, Gsm8kTool
from rally.tools.builtin.calculator import Calculator
from rally.tools.builtin.code_interpreter import CodeInterpreter
from rally.tools.builtin.image_zoom import ImageZoomInTool
from rally.tools.builtin.search import SearchTool
from rally.tools.function_tool import FunctionTool, function_tool
from rally.tools.mcp.config import is_mcp
from rally.tools.plain_class_tool import PlainTool
from rally.tools.process_tool import load_in_process
from rally.tools.process_worker import ToolSource
from rally.tools.schema import ToolConfigError
from rally.types import OnOutage, RallyError
from rally.util.checksums import UNREADABLE, reason


def import_class(dotted: str, folders: Iterable[Path], where: str) -> Any:
    """Import `package.module.Name` from the import path or from below one of `folders`."""
    module_name, _, name = dotted.rpartition(".")
    if not module_name or not all(dotted.split(".")):
        raise ToolConfigError(f"{where}: class_name {dotted!r} must be written as package.module.Class")
    module = _import_module(module_name, folders, where)
    try:
        imported = getattr(module, name)
    except AttributeError:
        own = (known for known, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
        classes = ", ".join(f"{module_name}.{known}" for known in own if known[0] != "_")
        advice = f"; correct class_name{f' to one of {classes}' if classes else ''}"
        raise ToolConfigError(f"{where}: module {module_name} has no {name!r}{advice}") from None
    if of_installed_verl(imported):
        raise ToolConfigError(f"{where}: {dotted} {INSTALLED}")
    return imported


def import_tool_file(path: Path) -> ModuleType:
    """Import the file `path`. It may import modules of its folder."""
    if not path.is_file():
        raise ToolConfigError(f"the tool file {path} does not exist")
    if path.suffix != ".py":
        raise ToolConfigError(f"the tool file {path} is not a Python file")
    try:
        return import_file(path, "tools_of")
    except ImportFailed as failed:
        raise _broken(f"the tool file {path}", failed) from failed


def _import_module(name: str, folders: Iterable[Path], where: str) -> ModuleType:
    candidates = [Path(folder).resolve() for folder in folders]
    relative = Path(*name.split("."))
    for folder in candidates:
        if (folder / relative.with_suffix(".py")).is_file() or (folder / relative / "__init__.py").is_file():
            look_in(folder)
    try:
        return import_module(name)
    except ImportFailed as failed:
        cause = failed.__cause__
        absent = isinstance(cause, ModuleNotFoundError) and f"{name}.".startswith(f"{cause.name}.")
        if not absent:
            raise _broken(f"{where}: module {name}", failed) from failed
        searched = ", ".join(dict.fromkeys(map(str, candidates)))
        raise ToolConfigError(f"{where}: there is no module {name!r}, neither installed nor below {searched}") from None


def _broken(source: str, failed: ImportFailed) -> ToolConfigError:
    advice, cause = "", failed.__cause__
    if isinstance(cause, ImportError) and (cause.name or "").split(".")[0] == "verl":
        advice = "; docs/from_verl.md lists the verl names that Rally provides"
    return ToolConfigError(f"{source} cannot be imported: {failed}{advice}")


BUILT_IN: dict[str, type[BaseTool[Any]]] = {
    "calculator": Calculator,
    "calc_gsm8k_reward": Gsm8kTool,
    "calc_geo3k_reward": Geo3kTool,
    "image_zoom_in_tool": ImageZoomInTool,
    "search": SearchTool,
    "code_interpreter": CodeInterpreter,
}

SAME_AS_BUILT_IN = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "calc_gsm8k_reward",
    "verl.tools.geo3k_tool.Geo3kTool": "calc_geo3k_reward",
    "verl.tools.image_zoom_in_tool.ImageZoomInTool": "image_zoom_in_tool",
    "verl.tools.calculator.Calculator": "calculator",
    "verl.tools.calculator_tool.CalculatorTool": "calculator",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": "code_interpreter",
    "Calculator": "calculator",
    "Gsm8kTool": "calc_gsm8k_reward",
    "SearchTool": "search",
}

BARE_KEYS = ("name", "description", "parameters")
OUTAGE_KEYS = ("on_outage", "timeout_counts")
ENTRY_KEYS = {"class_name", "config", "limits", "process", "tool_schema", *OUTAGE_KEYS, *BARE_KEYS}


def load_tools(source: str | Path | Mapping[str, Any], *, processes: bool = False) -> list[BaseTool[Any]]:
    """The tools of a YAML file, or of a mapping of the same shape. With `processes`, a user's tools run in processes of
    their own, as in a run."""
    if isinstance(source, Mapping):
        where, content, folder = "the tool config", source, Path.cwd()
        learn_tree(source)
    else:
        path = Path(source).expanduser()
        where, content, folder = str(path), read_yaml(path, "the tool config"), path.resolve().parent
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ToolConfigError(f"{where} must have a list under the key `tools`")
    load = _load_isolated if processes else load_entry
    tools = [tool for entry, at in _placed(entries, where) for tool in load(entry, folder, at)]
    check_names(tools, where)
    return tools


def load_entry(entry: Any, folder: Path, where: str) -> list[BaseTool[Any]]:
    """The tools of one entry of a tool YAML."""
    if isinstance(entry, Mapping) and "process" in entry:
        _process_memory(entry, where)
    return [_limited(tool, entry, where) for tool in _tools(entry, folder, where)]


def _load_isolated(entry: Any, folder: Path, where: str) -> list[BaseTool[Any]]:
    """The same; a user's class or function gets a process, unless the entry has `process: false`. Classes called
    `verl.*` are Rally's."""
    is_own = isinstance(entry, Mapping) and "class_name" in entry and not is_mcp(entry)
    known = is_own and (_class_name(entry) in BUILT_IN or _class_name(entry).startswith("verl."))
    if not is_own or known or entry.get("process") is False:
        return load_entry(entry, folder, where)
    memory_mb = _process_memory(entry, where)
    return load_in_process(ToolSource(where=where, entry=entry, folder=str(folder)), memory_mb)


def _process_memory(entry: Mapping[str, Any], where: str) -> int | None:
    process = entry.get("process")
    if isinstance(process, Mapping) and set(process) == {"memory_mb"} and type(process["memory_mb"]) is int:
        if process["memory_mb"] > 0:
            return process["memory_mb"]
    elif process is None or isinstance(process, bool):
        return None
    raise ToolConfigError(f"{where}: process must be true, false or {{memory_mb: a number above 0}}, not {process!r}")


def load_function_tools(path: str | Path, *, processes: bool = False) -> list[BaseTool[Any]]:
    """The functions with `@function_tool` in a Python file, in the order of the file. With `processes` they share a
    process of their own."""
    if processes:
        path = Path(path).expanduser()
        return load_in_process(ToolSource(where=str(path), functions=str(path)))
    module = import_tool_file(Path(path).expanduser())
    tools = list(dict.fromkeys(value for value in vars(module).values() if isinstance(value, FunctionTool)))
    if not tools:
        raise ToolConfigError(f"{path} defines no tool; put @function_tool above a function")
    check_names(tools, str(path))
    return list(tools)


def function_tools_of(places: Sequence[tuple[str, str]]) -> list[FunctionTool]:
    """The functions at (file or pkg://package.module, name) as tools. Those of one file share its state."""
    try:
        found = import_functions(places, "tools_of")
    except ImportFailed as failed:
        raise _broken(f"the tool file {', '.join(sorted({path for path, _ in places}))}", failed) from failed
    return [one if isinstance(one, FunctionTool) else function_tool(one) for one in found]


def check_names(tools: list[Any], where: str) -> None:
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ToolConfigError(f"{where}: two tools are called {twice!r}; give each its own name")


def read_yaml(path: Path, kind: str) -> Any:
    """The content of a YAML file with interpolations resolved. Error messages call the file `kind`."""
    if not path.is_file():
        raise ToolConfigError(f"{kind} {path} does not exist")
    try:
        written = OmegaConf.load(path)
        learn_tree(OmegaConf.to_container(written))
        return OmegaConf.to_container(written, resolve=True)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ToolConfigError(f"{path}{line}: this is not valid YAML ({error.problem})") from None
    except RecursionError:
        raise ToolConfigError(f"{kind} {path} is nested too deeply; write it with fewer levels") from None
    except (yaml.YAMLError, OmegaConfBaseException, *UNREADABLE) as error:  # the last for values of a wrong tag
        raise ToolConfigError(f"{kind} {path} cannot be read ({reason(error)})") from None


def _tools(entry: Any, folder: Path, where: str) -> list[BaseTool[Any]]:
    if not isinstance(entry, Mapping) or not is_mcp(entry):
        return [_tool(entry, folder, where)]
    try:
        from rally.tools.mcp.tools import mcp_tools
    except ModuleNotFoundError as error:
        advice = f"tools from MCP servers need the package {error.name}; run: pip install 'rally-rl[mcp]'"
        raise ToolConfigError(f"{where}: {advice}") from None
    try:
        return mcp_tools(entry, folder)
    except RallyError as error:
        raise ToolConfigError(f"{where}: {error}") from None


def _tool(entry: Any, folder: Path, where: str) -> BaseTool[Any]:
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping):
        raise ToolConfigError(f"{where}: an entry must be a mapping with class_name or name")
    unknown = sorted(map(str, set(entry) - ENTRY_KEYS))
    if unknown:
        raise ToolConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(ENTRY_KEYS))}")
    config = entry.get("config") or {}
    if not isinstance(config, Mapping):
        raise ToolConfigError(f"{where}: config must be a mapping, not {type(config).__name__}")
    if config.get("type", "native") != "native":
        raise ToolConfigError(f"{where}: config.type must be native, not {config['type']!r}")
    if "class_name" in entry:
        target = _by_class_name(entry, folder, where)
        _check_config(target, config, where)
        return _construct(target, config, entry.get("tool_schema"), where)
    built_in = _built_in(entry, where)
    _check_config(built_in, config, where)
    return _construct(built_in, config, _schema_override(built_in, entry), where)


def _check_config(target: Any, config: Mapping[str, Any], where: str) -> None:
    unused = next((key for key in config if key != "type"), None)
    if target in (Calculator, Gsm8kTool, Geo3kTool) and unused is not None:
        raise ToolConfigError(f"{where}: this tool has no settings, so config has no key {unused!r}; remove it")


def _placed(entries: Sequence[Any], where: str) -> list[tuple[Any, str]]:
    return [(entry, f"{where}, tool {index + 1}") for index, entry in enumerate(entries)]


def _limited(tool: BaseTool[Any], entry: Any, where: str) -> BaseTool[Any]:
    """The tool, with its limits and its handling of outages overridden by those of its entry."""
    if not isinstance(entry, Mapping):
        return tool
    if entry.get("limits") is not None:
        tool.limits = tool.limits.overridden(entry["limits"], where)
    if entry.get("on_outage") is not None:
        if entry["on_outage"] not in get_args(OnOutage):
            known = ", ".join(get_args(OnOutage))
            raise ToolConfigError(f"{where}: on_outage must be one of {known}, not {entry['on_outage']!r}")
        tool.on_outage = entry["on_outage"]
    if entry.get("timeout_counts") is not None:
        if not isinstance(entry["timeout_counts"], bool):
            raise ToolConfigError(f"{where}: timeout_counts must be true or false, not {entry['timeout_counts']!r}")
        tool.timeout_counts = entry["timeout_counts"]
    return tool


def _built_in(entry: Mapping[str, Any], where: str) -> type[BaseTool[Any]]:
    name = entry.get("name")
    if not isinstance(name, str) or name not in BUILT_IN:
        known = ", ".join(BUILT_IN)
        raise ToolConfigError(f"{where}: {name!r} is not a built-in tool ({known}); for your own, write class_name")
    return BUILT_IN[name]


def _schema_override(built_in: type[BaseTool[Any]], entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of the entry, or that of the built-in tool with the entry's name, description and parameters."""
    if entry.get("tool_schema") is not None:
        schema: Mapping[str, Any] = entry["tool_schema"]
        return schema
    overrides = {key: entry[key] for key in BARE_KEYS if entry.get(key) is not None}
    return {**built_in().tool_schema["function"], **overrides}


def _by_class_name(entry: Mapping[str, Any], folder: Path, where: str) -> Any:
    bare = next((key for key in BARE_KEYS if key in entry), None)
    if bare:
        raise ToolConfigError(f"{where}: with class_name, write {bare!r} under tool_schema")
    known = _class_name(entry)
    return BUILT_IN[known] if known in BUILT_IN else import_class(known, (Path.cwd(), folder), where)


def _class_name(entry: Mapping[str, Any]) -> str:
    """The class of an entry, or the name of the built-in tool that stands for it."""
    class_name = str(entry["class_name"])
    return SAME_AS_BUILT_IN.get(class_name, class_name)


def _construct(target: Any, config: Mapping[str, Any], schema: Mapping[str, Any] | None, where: str) -> BaseTool[Any]:
    if not callable(target):
        kind = type(target).__name__
        raise ToolConfigError(f"{where}: class_name names a {kind}; name a class, or a function with type hints")
    try:
        if not inspect.isclass(target):
            return _function(target, config, schema)
        if issubclass(target, BaseTool):
            return target(config=dict(config), tool_schema=target.schema_argument(schema))
        return PlainTool(target, config, schema)
    except RallyError as error:
        raise ToolConfigError(f"{where}: {error}") from None
    except (Exception, SystemExit, GeneratorExit) as error:  # a user's constructor may fail in any way
        raise ToolConfigError(f"{where}: the constructor failed: {type(error).__name__}: {error}") from error


def _function(function: Any, config: Mapping[str, Any], schema: Mapping[str, Any] | None) -> BaseTool[Any]:
    if set(config) - {"type"}:
        raise ToolConfigError("a function tool takes no config; remove it")
    if isinstance(function, FunctionTool):
        return function.with_schema(schema) if schema else function
    return FunctionTool(function, schema=schema)
