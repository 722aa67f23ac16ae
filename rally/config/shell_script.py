"""Reads the commands of a shell script without running it.

Variables, defaults such as `${N:-8}`, arrays, arithmetic and line continuations are expanded as a shell would. Tests
such as `[ "$X" = a ]` and `case` are decided, with variables that the script does not set taken as empty. Where only a
run could decide, the first branch is taken. Both are reported as assumptions. What only a run could tell, such as
`$(date)` or a variable of the environment, stays in a command as it is written.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

_SEPARATORS = ("&&", "||", ";;", ";", "|", "&", "\n")
_LOOPS = ("for", "while", "until", "select")
_SKIPPED = ("then", "do", "{", "}", "export", "local", "declare", "readonly", "!", "time", "exec", "function")
_ALWAYS_SET = ("HOME", "USER", "PWD", "PATH", "SHELL", "HOSTNAME", "UID", "RANDOM")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_HERE_DOCUMENT = re.compile(r"(?<!<)<<(?!<)-?\s*(['\"]?)(\w+)\1([^\n]*\n)(?:.*?\n)?\s*\2(?=\n|$)", re.DOTALL)
_NO_NPU = re.compile(r"import torch_npu.*\|\|\s*echo\s+(\w+)", re.DOTALL)
"""The probe of verl's scripts for an NPU. Rally has none, so the probe fails."""
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_NUMERIC = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
LITERAL = "\ue000"
"""Stands for a dollar sign that the shell does not expand."""
LARGEST = 10**15
"""Of a number in arithmetic. A script that multiplies further is left as it is."""
Variables = Mapping[str, list[str]]
Truth = bool | None
"""None where only a run could tell."""


class Statement(NamedTuple):
    """The words of a simple command with their quotes, and the separator that ends it."""

    words: list[str]
    end: str


class ShellScript(NamedTuple):
    """The expanded words of every command that runs, and what was assumed."""

    commands: list[list[str]]
    assumed: tuple[str, ...]


def read_commands(text: str) -> ShellScript:
    """The commands of a script, in order. Branches that are not taken are left out."""
    shell = _Shell()
    text = _HERE_DOCUMENT.sub(lambda match: f"<{match[2]}{match[3]}", text.replace("\r\n", "\n"))
    for statement in _statements(text):
        shell.run(statement)
    return ShellScript(shell.commands, tuple(shell.assumed))


@dataclass
class _Branch:
    """A compound command that is open: whether its present branch runs, and whether an earlier one did."""

    kind: str
    runs: Truth = False
    taken: Truth = False
    subject: str | None = None
    patterns: list[str] = field(default_factory=list)
    in_pattern: bool = False
    later: bool = False
    """Whether an earlier branch was undecided, and taken. This one then only sets what is not set yet."""

    def enter(self, condition: Truth) -> None:
        """Go on to the next branch, which runs under the condition if no earlier one did."""
        self.later = self.taken is None
        self.runs = _both(_opposite(self.taken), condition)
        self.taken = _either(self.taken, condition)


class _Shell:
    """Executes assignments and decides branches; commands are collected and not run."""

    def __init__(self) -> None:
        self.variables: dict[str, list[str]] = {}
        self.commands: list[list[str]] = []
        self.assumed: dict[str, None] = {}
        self.open: list[_Branch] = []
        self.condition: list[Statement] | None = None
        self.status: Truth = True
        self.after = "\n"

    def run(self, statement: Statement) -> None:
        words, end = statement
        if self.open and self.open[-1].in_pattern and words[:1] != ["esac"]:
            words = self._pattern(words)
        while words and self.condition is None and (rest := self._keyword(words, end)) is not None:
            words = rest
            if self.open and self.open[-1].in_pattern and words:
                words = self._pattern(words)
        if self.condition is not None:
            self._collect(Statement(words, end))
            return
        if words:
            self._simple(words, end)
        if end == ";;" and self.open and self.open[-1].kind == "case":
            self.open[-1].in_pattern, self.open[-1].runs = True, False
        self.after = end

    def _keyword(self, words: list[str], end: str) -> list[str] | None:
        """The words after a reserved word, or None if there is none."""
        word, rest = words[0], words[1:]
        if word in ("if", "elif"):
            if word == "if":
                self.open.append(_Branch("if"))
            self.condition = []
        elif word == "else" and self.open:
            self._enter(True, "else")
        elif word == "case":
            branch = _Branch("case", in_pattern=True)
            self.open.append(branch)
            branch.subject = self._value(rest[0]) if rest and self._runs_around else None
            rest = rest[2:]
        elif word in _LOOPS:
            self.open.append(_Branch("loop", runs=None))
            rest = []
        elif word in ("fi", "esac", "done"):
            self.open = self.open[:-1]
            rest = []
        elif word not in _SKIPPED:
            return None
        return rest

    def _collect(self, statement: Statement) -> None:
        """Gather the condition of `if` up to `then`."""
        assert self.condition is not None
        if statement.words[:1] != ["then"]:
            self.condition.append(statement)
            return
        tokens = list(_tokens(self.condition))
        shown = " ".join(word for words, end in self.condition for word in (*words, *([end] if end.strip() else [])))
        self.condition = None
        if self.open:
            decides = self._runs_around and self.open[-1].taken is not True
            self._enter(self._evaluated(tokens) if decides else False, f"if {shown.removesuffix(' ;')}")
        self.run(Statement(statement.words[1:], statement.end))

    def _pattern(self, words: list[str]) -> list[str]:
        """Read a pattern of `case`; the words after its parenthesis are those of a branch."""
        branch = self.open[-1]
        for at, word in enumerate(words):
            branch.patterns.append(word.removeprefix("(").removesuffix(")"))
            if word.endswith(")"):
                branch.in_pattern = False
                texts = [self._value(pattern) for pattern in branch.patterns]
                branch.patterns = []
                fits: Truth = None
                if branch.subject is not None and None not in texts:
                    fits = any(fnmatchcase(branch.subject, text) for text in texts if text is not None)
                self._enter(True if "*" in texts else fits, f"case ... {word}")
                return words[at + 1 :]
        return []

    def _enter(self, condition: Truth, shown: str) -> None:
        branch = self.open[-1]
        branch.enter(condition)
        if self._runs_around and branch.runs is None and not branch.later:
            self.assumed[f"`{shown}` depends on the machine; the first branch is taken"] = None

    @property
    def _runs_around(self) -> bool:
        """Whether the commands around the innermost branch run."""
        return all(branch.runs is not False for branch in self.open[:-1])

    def _simple(self, words: list[str], end: str) -> None:
        """Assign, or collect a command, if it runs."""
        runs: Truth = {"&&": self.status, "||": _opposite(self.status)}.get(self.after, True)
        if all(branch.runs is not False for branch in self.open) and runs is not False:
            undecided = runs is None or any(branch.runs is None for branch in self.open)
            later = any(branch.later and branch.runs is None for branch in self.open)
            self.status = self._run_simple(words, undecided, later)
        elif self.after not in ("&&", "||"):
            self.status = True

    def _run_simple(self, words: list[str], undecided: bool, later: bool) -> Truth:
        assigned = []
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            assigned.append(match)
            words = words[1:]
        for match in assigned if not words else ():  # before a command they are its environment
            if not (later and match[2]):
                self._assign(match, undecided)
        if words and words[0] in ("[", "[[", "test", "true", "false"):
            return self._test(words)
        if not later and (expanded := [part for word in words for part in _expand(word, self.variables)]):
            self.commands.append(expanded)
        return True

    def _assign(self, match: re.Match[str], undecided: bool) -> None:
        name, plus, value = match.groups()
        if undecided and not plus and any(self.variables.get(name, [])):
            return  # of several values that depend on a condition, the first is taken
        if value.startswith("(") and value.endswith(")"):
            words = [word for statement in _statements(value[1:-1]) for word in statement.words]
            items = [part for word in words for part in _expand(word, self.variables)]
            self.variables[name] = [*(self.variables.get(name, []) if plus else []), *items]
            return
        quoted = '"' in value or "'" in value
        joined = " ".join(_expand(value if quoted else f'"{value}"', self.variables))
        before = self.variables.get(name, [""]) if plus else [""]
        self.variables[name] = [f"{before[0] if before else ''}{joined}"]

    def _evaluated(self, tokens: list[str | list[str]]) -> Truth:
        """The truth of a condition; `&&` and `||` are of equal precedence, as in a shell."""
        value: Truth = True
        joined, negated = "&&", False
        while tokens:
            token = tokens.pop(0)
            if token == "}":
                break
            if token in ("&&", "||", ";"):
                joined = str(token)
                continue
            if token == "!":
                negated = True
                continue
            found = self._evaluated(tokens) if token == "{" else self._test(list(token))
            found, negated = (_opposite(found) if negated else found), False
            value = {"&&": _both(value, found), "||": _either(value, found)}.get(joined, found)
        return value

    def _test(self, words: list[str]) -> Truth:
        if words[0] in ("true", ":", "false"):
            return words[0] != "false"
        if words[0] not in ("[", "[[", "test"):
            return None
        inner = [word for word in words[1:] if word not in ("]", "]]")]
        if inner[:1] == ["!"]:
            return _opposite(self._test([words[0], *inner[1:]]))
        if len(inner) == 2 and inner[0] in ("-z", "-n"):
            text = self._value(inner[1])
            return None if text is None else bool(text) == (inner[0] == "-n")
        if len(inner) == 1:
            return None if (text := self._value(inner[0])) is None else bool(text)
        return self._comparison(inner, words[0] == "[[") if len(inner) == 3 else None

    def _comparison(self, inner: list[str], patterns: bool) -> Truth:
        left, right = self._value(inner[0]), self._value(inner[2])
        if left is None or right is None:
            return None
        if inner[1] in ("=", "==", "!="):
            same = fnmatchcase(left, right) if patterns else left == right
            return same == (inner[1] != "!=")
        if inner[1] in _NUMERIC and re.fullmatch(r"-?\d{1,15}", left) and re.fullmatch(r"-?\d{1,15}", right):
            return bool(_NUMERIC[inner[1]](int(left), int(right)))
        return None

    def _value(self, word: str) -> str | None:
        """The text that a word stands for in a test. A variable that the script does not set is taken as empty."""
        text = " ".join(_expand(word, self.variables))
        for name in re.findall(r"\$\{?([A-Za-z_]\w*)\}?", text):
            if name in _ALWAYS_SET:
                return None
            self.assumed[f"{name} is not set"] = None
        text = re.sub(r"\$\{([A-Za-z_]\w*)\}|\$([A-Za-z_]\w*)", "", text)
        return None if "$" in text or "`" in text else text


def _both(left: Truth, right: Truth) -> Truth:
    return False if left is False or right is False else None if left is None or right is None else True


def _either(left: Truth, right: Truth) -> Truth:
    return _opposite(_both(_opposite(left), _opposite(right)))


def _opposite(value: Truth) -> Truth:
    return None if value is None else not value


def _tokens(condition: Sequence[Statement]) -> Iterator[str | list[str]]:
    """Commands, operators and groups of a condition. `[[ a && b ]]` is a group of two tests."""
    inside = False
    for words, end in condition:
        while words and words[0] in ("{", "}", "!"):
            yield words[0]
            words = words[1:]
        if words:
            opens, closes = words[0] == "[[", words[-1] == "]]"
            if opens and not closes:
                yield "{"
            yield ["[[", *words] if inside and not opens else list(words)
            if inside and closes:
                yield "}"
            inside = (inside or opens) and not closes
        if end in ("&&", "||", ";"):
            yield end


def _statements(text: str) -> Iterator[Statement]:
    """Every simple command. Comments and the ends of continued lines are removed."""
    words: list[str] = []
    word, at, quote, nested = "", 0, "", 0
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
            yield Statement([*words, word] if word else words, mark)
            words, word = [], ""
            at += len(mark)
            continue
        else:
            word += char
        at += 1
    yield Statement([*words, word] if word else words, "\n")


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _expand(word: str, variables: Variables) -> list[str]:
    """The words that a word of the script stands for: several for an array, none for the script's own arguments."""
    array = re.fullmatch(r'"?\$(?:\{(\w+)\[[@*]\]\}|([@*])|\{([@*])(?::\d+)?\})"?', word)
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
    """The parts of a word with the quote that each stands in. `${...}` and `$(...)` are whole, with their quotes."""
    at, part, quote = 0, "", ""
    while at < len(word):
        char = word[at]
        if char == "$" and quote != "'" and (end := _closing(word, at + 1)):
            part, at = part + word[at:end], end
            continue
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


def _closing(text: str, at: int) -> int:
    """The place after the bracket that closes the one at a place, or 0 if there is none."""
    if text[at : at + 1] not in ("{", "("):
        return 0
    opening, depth = text[at], 0
    for here in range(at, len(text)):
        depth += (text[here] == opening) - (text[here] == {"{": "}", "(": ")"}[opening])
        if not depth:
            return here + 1
    return 0


def _substituted(text: str, variables: Variables, depth: int = 0) -> str:
    """The text with variables replaced. What is not known stays as it is written."""
    parts: list[str] = []
    at = 0
    while (start := text.find("$", at)) >= 0:
        parts.append(text[at:start])
        end = _closing(text, start + 1)
        plain = re.compile(r"[A-Za-z_]\w*|[@*#?]|\d").match(text, start + 1)
        at = end or (plain.end() if plain else start + 1)
        whole = text[start:at]
        if depth > 20 or not (end or plain):
            parts.append(whole)
        elif not end:
            parts.append(_variable(whole[1:], whole, variables))
        elif whole.startswith("$(("):
            inner = re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", whole[3:-2])
            known = _calculated(_substituted(inner, variables, depth + 1)) if whole.endswith("))") else ""
            parts.append(known or whole)
        elif whole.startswith("$("):
            parts.append(match[1] if (match := _NO_NPU.search(whole[2:-1])) else whole)
        else:
            parts.append(_braced(whole, variables, depth))
    return "".join((*parts, text[at:]))


def _variable(name: str, whole: str, variables: Variables) -> str:
    if name in "@*" or name.isdigit():
        return "" if name != "0" else whole
    return " ".join(variables[name]) if name in variables else whole


def _braced(whole: str, variables: Variables, depth: int) -> str:
    """`${...}`: a variable, an array, or a variable with a default."""
    inner = whole[2:-1]
    if array := re.fullmatch(r"(\w+)\[[@*]\]", inner):
        return " ".join(variables.get(array[1], []))
    if re.fullmatch(r"[@*](:\d+)?", inner):
        return ""
    parts = re.fullmatch(r"(\w+)(:?[-=+?])(.*)", inner, re.DOTALL)
    if parts is None:
        return _variable(inner, whole, variables) if re.fullmatch(r"\w+", inner) else whole
    known = " ".join(variables.get(parts[1], []))
    if parts[2].endswith("+"):
        return _substituted(parts[3].strip("\"'"), variables, depth + 1) if known else ""
    return known or _substituted(parts[3].strip("\"'"), variables, depth + 1)


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
