"""Finds the command of verl in a shell script, and says what each of its keys becomes. The script is never run.

Variables, defaults such as `${N:-8}`, arrays, arithmetic and line continuations are expanded as a shell would. Of
several values that depend on a condition, the first is taken. What only a run could tell, such as `$(date)` or a
variable of the environment, stays in the command as it is written.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rally.config.errors import ConfigError, shown
from rally.config.load import explain
from rally.config.schema import Config
from rally.config.sft import SftConfig

TRAINERS = {
    "verl.trainer.main_ppo": "train",
    "verl.trainer.main_ppo_sync": "train",
    "recipe.dapo.main_dapo": "train",
    "recipe.entropy.main_entropy": "train",
    "verl.trainer.fsdp_sft_trainer": "sft",
    "verl.trainer.sft_trainer": "sft",
    "verl.trainer.sft_trainer_ray": "sft",
}
"""The modules of verl whose command lines are those of `rally train` and `rally sft`."""
_SEPARATORS = ("&&", "||", ";;", ";", "|", "&", "\n")
_BRANCHES = ("if", "elif", "else", "case", "for", "while", "until", "function")
_ENDS = ("fi", "esac", "done")
_WORDS = (*_BRANCHES, *_ENDS, "then", "do", "{", "}", "export", "local", "declare", "readonly", "!", "time", "exec")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
LITERAL = "\ue000"
"""Stands for a dollar sign that the shell does not expand."""
LARGEST = 10**15
"""Of a number in arithmetic. A script that multiplies further is left as it is."""


class VerlCommand(NamedTuple):
    """A command of verl as a script passes it."""

    module: str
    config_path: str | None
    config_name: str | None
    words: tuple[str, ...]


def rally_command(module: str) -> str:
    """`train` or `sft` for a module of verl, or a ConfigError that says why there is no such command."""
    if module in TRAINERS:
        return TRAINERS[module]
    if "async" in module or "one_step_off" in module or "partial_rollout" in module:
        raise ConfigError(f"{module} is an asynchronous trainer, which is not built; use verl.trainer.main_ppo.")
    known = "verl.trainer.main_ppo, recipe.dapo.main_dapo and verl.trainer.sft_trainer"
    raise ConfigError(f"{module} is a trainer of its own, which is not built; Rally runs the command lines of {known}.")


def read_script(text: str) -> VerlCommand:
    """The last command of verl in the script, or a ConfigError if there is none."""
    found = _last_command(text)
    return found._replace(words=tuple(word.replace(LITERAL, "$") for word in found.words))


def _last_command(text: str) -> VerlCommand:
    found: VerlCommand | None = None
    for words in _commands(text):
        found = _verl_command(words) or found
    if found is None:
        raise ConfigError("the script has no command of verl, such as `python3 -m verl.trainer.main_ppo ...`.")
    return found


def from_verl(path: Path) -> str:
    """The command of Rally that does what the script does, after one line for each key that is not taken as it is."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; check the path of the script.") from None
    except (UnicodeDecodeError, IsADirectoryError):
        raise ConfigError(f"{path} is not a shell script of UTF-8 text; name one.") from None
    module, config_path, config_name, words = _last_command(text)
    command = rally_command(module)
    known = [word.replace(LITERAL, "$") for word in words if "$" not in word.partition("=")[2]]
    file = None if config_name is None else Path(config_path or ".") / f"{config_name.removesuffix('.yaml')}.yaml"
    report = explain(Config if command == "train" else SftConfig, file, known)
    renamed, lines, gone = dict(report.moved), [], set()
    for old, new in report.moved:
        lines.append(f"# renamed: {old} is {new} here")
    for key, value, why in report.dropped:
        lines.append(f"# dropped: {key}={shown(value)}: {why}")
        gone.add(key)
    for problem in report.problems:
        lines.append(f"# refused: {problem}")
    gone |= set(report.refused)
    options = [f"--config-path {shlex.quote(config_path)}"] if config_path and file and file.exists() else []
    options += [f"--config-name {shlex.quote(config_name)}"] if config_name and file and file.exists() else []
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if not equals or _within(key, gone):
            continue
        options.append(f"{renamed.get(key, key)}={_quoted(value)}")
    return "\n".join((*lines, " \\\n    ".join((f"rally {command}", *options))))


def _within(key: str, keys: set[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in keys)


def _quoted(value: str) -> str:
    """The value as a shell reads it. What the shell of the reader must expand stays outside of single quotes."""
    if "$" in value:
        return '"' + re.sub(r'(["\\`])', r"\\\1", value).replace(LITERAL, "\\$") + '"'
    return shlex.quote(value.replace(LITERAL, "$")) if value else ""


def _verl_command(words: Sequence[str]) -> VerlCommand | None:
    """The module and its arguments, if the words are a command of verl."""
    for at, word in enumerate(words):
        module = words[at + 1] if word == "-m" and at + 1 < len(words) else ""
        rest = words[at + 2 :]
        if not module and word.endswith(".py") and re.search(r"main_\w+\.py|sft_trainer\.py", word):
            module, rest = word.removesuffix(".py").lstrip("./").replace("/", "."), words[at + 1 :]
        if module.startswith(("verl.", "recipe.")) or ".main_" in f".{module}":
            return _arguments(module, rest)
    return None


def _arguments(module: str, words: Sequence[str]) -> VerlCommand:
    options: dict[str, str] = {}
    kept: list[str] = []
    waiting = None
    for word in words:
        name, equals, value = word.partition("=")
        if waiting:
            options[waiting], waiting = word, None
        elif name in ("--config-path", "--config-name", "-cp", "-cn", "--config-dir"):
            name = {"-cp": "--config-path", "-cn": "--config-name"}.get(name, name)
            if equals:
                options[name] = value
            else:
                waiting = name
        elif re.fullmatch(r"\d*[<>&]+", word):
            waiting = "redirection"
        elif not re.match(r"\d*[<>]|-", word) and word:
            kept.append(word)
    return VerlCommand(module, options.get("--config-path"), options.get("--config-name"), tuple(kept))


def _commands(text: str) -> Iterator[list[str]]:
    """The expanded words of every simple command, with the variables that the script has set before it."""
    variables: dict[str, list[str]] = {}
    depth = 0
    for raw in _statements(text):
        while raw and raw[0] in _WORDS:
            depth += (raw[0] in ("if", "case", "for", "while", "until")) - (raw[0] in _ENDS)
            raw = raw[1:]
        assigned = []
        while raw and (match := _ASSIGNMENT.fullmatch(raw[0])):
            assigned.append(match)
            raw = raw[1:]
        for match in assigned if not raw or not any(word == "-m" for word in raw) else ():
            _assign(match, variables, conditional=depth > 0)
        words = [part for word in raw for part in _expand(word, variables)]
        if words:
            yield words


def _assign(match: re.Match[str], variables: dict[str, list[str]], conditional: bool) -> None:
    name, plus, value = match.groups()
    if conditional and not plus and any(variables.get(name, [])):
        return  # of several values that depend on a condition, the first is taken
    if value.startswith("(") and value.endswith(")"):
        items = [
            part for statement in _statements(value[1:-1]) for word in statement for part in _expand(word, variables)
        ]
        variables[name] = [*(variables.get(name, []) if plus else []), *items]
        return
    joined = " ".join(_expand(f'"{value}"' if '"' not in value and "'" not in value else value, variables))
    before = variables.get(name, [""]) if plus else [""]
    variables[name] = [f"{before[0] if before else ''}{joined}"]


def _statements(text: str) -> Iterator[list[str]]:
    """The raw words of every command, with their quotes. Comments and the ends of continued lines are removed."""
    words: list[str] = []
    word, at, quote, nested = "", 0, "", 0
    text = text.replace("\r\n", "\n")
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'" and at + 1 < len(text):
            following = text[at + 1]
            at += 2
            word += char + following if following != "\n" else ""
            continue
        if quote:
            quote = "" if char == quote else quote
            word += char
        elif nested:
            nested += (char in "({") - (char in ")}")
            quote = char if char in "\"'" else ""
            if char == "#" and word[-1:].isspace():
                at = _line_end(text, at)
                continue
            word += char
        elif char in "\"'":
            quote, word = char, word + char
        elif char in "({" and word.endswith(("$", "=")):
            nested, word = 1, word + char
        elif char == "#" and not word:
            at = _line_end(text, at)
            continue
        elif char.isspace() and char != "\n":
            words, word = ([*words, word], "") if word else (words, "")
        elif any(text.startswith(mark, at) for mark in _SEPARATORS) and not (char == "&" and word.endswith((">", "<"))):
            mark = next(mark for mark in _SEPARATORS if text.startswith(mark, at))
            yield [*words, word] if word else words
            words, word = [], ""
            at += len(mark)
            continue
        else:
            word += char
        at += 1
    yield [*words, word] if word else words


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


_EXPANSION = re.compile(
    r"\$(?:(\w+|[@*#?])|\{(\w+|@)\[[@*]\]\}|\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|\(\(((?:[^()]|\([^()]*\))*)\)\)|(\([^()]*\)))"
)


def _expand(word: str, variables: Mapping[str, list[str]]) -> list[str]:
    """The words that a word of the script stands for: several for an array, none for the script's own arguments."""
    array = re.fullmatch(r'"?\$(?:\{(\w+)\[[@*]\]\}|([@*])|\{([@*])\})"?', word)
    if array:
        return list(variables.get(array[1], [])) if array[1] else []
    split = re.fullmatch(r"\$\{?(\w+)\}?", word)  # an unquoted variable is split at spaces
    if split and split[1] in variables:
        return " ".join(variables[split[1]]).split()
    return [
        "".join(
            body.replace("$", LITERAL) if kind == "'" else _substituted(body, variables) for kind, body in _quotes(word)
        )
    ]


def _quotes(word: str) -> Iterator[tuple[str, str]]:
    """The parts of a word with the quote that each stands in."""
    at, part, quote = 0, "", ""
    while at < len(word):
        char = word[at]
        if char == "\\" and quote != "'" and at + 1 < len(word):
            keep = quote == '"' and word[at + 1] not in '"\\$`'
            part += (char if keep else "") + word[at + 1].replace("$", LITERAL)
            at += 2
            continue
        if (quote and char == quote) or (not quote and char in "\"'"):
            yield quote, part
            quote, part = ("" if quote else char), ""
        else:
            part += char
        at += 1
    yield quote, part


def _substituted(text: str, variables: Mapping[str, list[str]], depth: int = 0) -> str:
    """The text with variables replaced. What is not known stays as it is written."""

    def replaced(match: re.Match[str]) -> str:
        name, array, braced, arithmetic, command = match.groups()
        if command is not None or depth > 20:
            return match[0]
        if arithmetic is not None:
            return (
                _calculated(_substituted(re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", arithmetic), variables, depth + 1))
                or match[0]
            )
        if array:
            return " ".join(variables.get(array, []))
        if name:
            if name in "@*" or name.isdigit():
                return "" if name != "0" else match[0]
            return " ".join(variables[name]) if name in variables else match[0]
        parts = re.fullmatch(r"(\w+)(:?[-=+?])(.*)", braced or "", re.DOTALL)
        if parts is None:
            return " ".join(variables[braced]) if braced in variables else match[0]
        known = " ".join(variables.get(parts[1], []))
        if parts[2].endswith("+"):
            return _substituted(parts[3].strip("\"'"), variables, depth + 1) if known else ""
        return known or _substituted(parts[3].strip("\"'"), variables, depth + 1)

    return _EXPANSION.sub(replaced, text)


def _calculated(text: str) -> str:
    """The value of an arithmetic expression of numbers, or nothing if it is another expression."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < LARGEST:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            result = int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
            if abs(result) < LARGEST:
                return result
        raise ValueError(text)

    try:
        return str(value(ast.parse(text.strip(), mode="eval")))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return ""
