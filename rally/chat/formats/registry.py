"""The tool-call formats by name, and the formats that users add.

The names of vLLM's tool parsers are accepted, as names or aliases. A user's format is a subclass of `ToolFormat`,
registered with `@register_format("name")` in a file, or named by its dotted path.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rally.chat.formats.base import CallKeys, ToolFormat
from rally.chat.formats.gemma_calls import GemmaCalls
from rally.chat.formats.json_calls import JsonCalls
from rally.chat.formats.llama3_json import BareJson
from rally.chat.formats.named_json import Functionary, Harmony, Mistral, NamedJson
from rally.chat.formats.plain_call import PlainCalls
from rally.chat.formats.python_calls import PythonCalls
from rally.chat.formats.tagged_arguments import TaggedArguments, Tags
from rally.importing import ImportFailed, import_module, import_path, look_in
from rally.types import RallyError

Format = TypeVar("Format", bound=type[ToolFormat])
AUTO = "auto"

_DSML = Tags('<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>")
_DSML_ARGUMENT = Tags('<｜DSML｜parameter name="{key}" string="{string}">', "</｜DSML｜parameter>\n")
_QWEN_ARGUMENT = Tags("<parameter={key}>", "</parameter>\n")
_INVOKE, _PARAMETER = Tags('<invoke name="{name}">\n', "</invoke>"), Tags('<parameter name="{key}">', "</parameter>\n")
_HY = ":opensource"
_M3 = "]<]minimax[>["

BUILT_IN: tuple[ToolFormat, ...] = (
    JsonCalls("hermes", "<tool_call>", "</tool_call>"),
    TaggedArguments(
        "qwen3_coder",
        Tags("<function={name}>\n", "</function>\n"),
        _QWEN_ARGUMENT,
        Tags("<tool_call>\n", "</tool_call>"),
        shared=False,
        padded=True,
    ),
    BareJson("llama3_json"),
    PlainCalls(),
    Mistral("mistral", "list"),
    Mistral("mistral_v11", "v11"),
    Mistral("mistral_v13", "v13"),
    NamedJson(
        "deepseek_v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        joint="\n",
    ),
    NamedJson(
        "deepseek_v31",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    TaggedArguments(
        "deepseek_v32", _DSML, _DSML_ARGUMENT, Tags("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>")
    ),
    TaggedArguments("deepseek_v4", _DSML, _DSML_ARGUMENT, Tags("<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>")),
    NamedJson(
        "kimi_k2",
        "<|tool_call_begin|>{id}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        id_pattern=r"functions\.(?P<name>.+):\d+",
    ),
    TaggedArguments(
        "kimi_k3",
        Tags('<|open|>call tool="{name}" index="{index}"<|sep|>', "<|close|>call<|sep|>"),
        Tags('<|open|>argument key="{key}" type="{type}"<|sep|>', "<|close|>argument<|sep|>"),
        Tags("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        joint="",
    ),
    TaggedArguments(
        "glm45",
        Tags("<tool_call>{name}\n", "</tool_call>"),
        Tags("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    TaggedArguments(
        "glm47",
        Tags("<tool_call>{name}", "</tool_call>"),
        Tags("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"),
        joint="",
    ),
    Harmony(),
    GemmaCalls("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
    GemmaCalls("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    PythonCalls("pythonic", "<|python_start|>", "<|python_end|>", bare=True),
    PythonCalls("lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
    PythonCalls("olmo3", "<function_calls>", "</function_calls>", lines=True),
    TaggedArguments("minimax_m2", _INVOKE, _PARAMETER, Tags("<minimax:tool_call>\n", "\n</minimax:tool_call>")),
    TaggedArguments(
        "minimax_m3",
        Tags(f'{_M3}<invoke name="{{name}}">', f"{_M3}</invoke>\n"),
        Tags(f"{_M3}<{{key}}>", f"{_M3}</{{key}}>"),
        Tags(f"{_M3}<tool_call>\n", f"{_M3}</tool_call>"),
        joint="",
    ),
    JsonCalls("minimax_m1", "<tool_calls>", "</tool_calls>", layout="lines"),
    JsonCalls(
        "cohere_command3",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        layout="list",
        keys=CallKeys("tool_name", "parameters", "tool_call_id"),
    ),
    JsonCalls("command_r", "Action: ```json\n", layout="list", keys=CallKeys("tool_name", "parameters")),
    JsonCalls("granite", "<|tool_call|>", layout="list"),
    JsonCalls("granite_20b_fc", "<function_call>"),
    JsonCalls("phi4_mini_json", "functools", layout="list", before=r"\s*\["),
    TaggedArguments(
        "seed_oss",
        Tags("<function={name}>\n", "</function>\n"),
        _QWEN_ARGUMENT,
        Tags("<seed:tool_call>\n", "</seed:tool_call>"),
        shared=False,
    ),
    JsonCalls("internlm", "<|action_start|><|plugin|>", "<|action_end|>"),
    JsonCalls("nemotron", "<TOOLCALL>", "</TOOLCALL>", layout="list"),
    JsonCalls("hunyuan_a13b", "<tool_calls>", "</tool_calls>", layout="list"),
    JsonCalls("apriel", "<tool_calls>", "</tool_calls>", layout="list", keys=CallKeys(id="id")),
    JsonCalls("longcat", "<longcat_tool_call>", "</longcat_tool_call>"),
    JsonCalls("apertus", "<|tools_prefix|>", "<|tools_suffix|>", layout="list", keyed=True),
    JsonCalls("gigachat3", "function call<|role_sep|>\n"),
    JsonCalls("gigachat31", "<|function_call|>", margin=""),
    TaggedArguments(
        "step3",
        Tags('<steptml:invoke name="{name}">', "</steptml:invoke>"),
        Tags('<steptml:parameter name="{key}">', "</steptml:parameter>"),
        Tags("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        lead="<｜tool_call_begin｜>function<｜tool_sep｜>",
        trail="<｜tool_call_end｜>",
    ),
    TaggedArguments(
        "hy_v3",
        Tags(f"<tool_call{_HY}>{{name}}<tool_sep{_HY}>\n", f"</tool_call{_HY}>"),
        Tags(f"<arg_key{_HY}>{{key}}</arg_key{_HY}>\n<arg_value{_HY}>", f"</arg_value{_HY}>\n"),
        Tags(f"<tool_calls{_HY}>\n", f"\n</tool_calls{_HY}>"),
    ),
    TaggedArguments(
        "minicpm5",
        Tags('<function name="{name}">', "</function>"),
        Tags('<param name="{key}">', "</param>"),
        cdata=True,
    ),
    TaggedArguments(
        "muse_glimmer",
        Tags('<atem:invoke name="{name}">\n', "</atem:invoke>"),
        Tags('<atem:parameter name="{key}">', "</atem:parameter>\n"),
        Tags("<atem:function_calls>\n", "\n</atem:function_calls>"),
    ),
    TaggedArguments("dots", _INVOKE, _PARAMETER, Tags("<dots_function_call>\n", "\n</dots_function_call>")),
    NamedJson("functionary_v31", "<function={name}>", "</function>"),
    Functionary("functionary_v32", ">>>{name}\n", not_tools=("all",)),
    NamedJson(
        "solar",
        "<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>",
        "<|tool_call:end|>",
        section=("<|tool_calls|>", ""),
    ),
    BareJson("xlam", "arguments", listed=True),
)
FORMATS: dict[str, ToolFormat] = {tool_format.name: tool_format for tool_format in BUILT_IN}
ALIASES = {
    **dict.fromkeys(("qwen", "qwen2_5", "qwen3", "granite4", "ernie45", "ernie", "reka"), "hermes"),
    **dict.fromkeys(("qwen3_xml", "qwen3_5", "mimo", "step3p5", "nemotron3"), "qwen3_coder"),
    **dict.fromkeys(("glm46", "poolside_v1"), "glm45"),
    **dict.fromkeys(("openai", "gpt_oss", "gpt-oss"), "harmony"),
    **dict.fromkeys(("cohere", "cohere_command4"), "cohere_command3"),
    "jamba": "hunyuan_a13b",
    "ling3": "glm47",
    "llama4_json": "llama3_json",
    "minimax": "minimax_m2",
    **dict.fromkeys(("phi4_mini", "firefunction"), "phi4_mini_json"),
    "internlm2": "internlm",
    "granite-20b-fc": "granite_20b_fc",
    **dict.fromkeys(("llama4_pythonic", "llama3_2_pythonic"), "pythonic"),
}


def register_format(name: str) -> Callable[[Format], Format]:
    """Class decorator that registers a user's format under `name`, for multi_turn.format and data.tool_format."""

    def add(cls: Format) -> Format:
        made = _checked(cls, name)
        if isinstance(FORMATS.get(name), ToolFormat) and FORMATS[name] in BUILT_IN:
            raise RallyError(f"the tool-call format {name!r} exists already; register yours under another name")
        FORMATS[name] = made
        return cls

    return add


def load_formats(path: str) -> None:
    """Import a Python file, or a module by `pkg://` and its dotted name, that registers formats."""
    look_in(Path.cwd())
    before = dict(FORMATS)
    try:
        import_path(path, "tool_format")
    except ImportFailed as failed:
        raise RallyError(f"the tool-call formats at {path} cannot be imported ({failed}); correct it") from failed
    if before == FORMATS and path not in _loaded:
        raise RallyError(f'{path} registers no tool-call format; decorate a class in it with @register_format("name")')
    _loaded.add(path)


_loaded: set[str] = set()


def get_format(name: str) -> ToolFormat:
    """The format called `name`: a built-in or registered one, or a class by its dotted path. Raises RallyError with the
    known names."""
    tool_format = FORMATS.get(ALIASES.get(name, name))
    if tool_format is None and "." in name:
        tool_format = _imported(name)
    if tool_format is None:
        known = ", ".join(sorted([*FORMATS, *ALIASES]))
        raise RallyError(
            f"unknown tool-call format {name!r}; choose one of {AUTO}, {known}, or a class by its dotted path"
        )
    return tool_format


def _imported(path: str) -> ToolFormat:
    module_name, _, class_name = path.removeprefix("pkg://").rpartition(".")
    look_in(Path.cwd())
    try:
        module = import_module(module_name)
    except ImportFailed as failed:
        raise RallyError(f"the tool-call format {path} cannot be imported ({failed}); correct its path") from failed
    if not hasattr(module, class_name):
        raise RallyError(f"there is no class {class_name} in {module_name}; correct the tool-call format {path}")
    return _checked(getattr(module, class_name), path)


def _checked(cls: Any, name: str) -> ToolFormat:
    if not (isinstance(cls, type) and issubclass(cls, ToolFormat)):
        raise RallyError(f"{name} is not a subclass of rally.chat.ToolFormat; a tool-call format must be one")
    for method in ("find", "render"):
        if getattr(cls, method) is getattr(ToolFormat, method):
            raise RallyError(f"the tool-call format {name} has no method {method}; define it (docs/chat.md)")
    try:
        made = cls()
    except Exception as error:  # user code may raise anything
        raise RallyError(f"the tool-call format {name} cannot be made ({error}); it must take no arguments") from error
    made.name = name
    return made
