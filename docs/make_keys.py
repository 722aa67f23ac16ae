"""Prints docs/keys.md from the configuration schema: every key with its type, its default and its description.

python docs/make_keys.py > docs/keys.md
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from rally.config import Config, SftConfig, base
from rally.config.base import Only, Root, Section
from rally.config.checks.unsupported import SFT_UNSUPPORTED, UNSUPPORTED, Unsupported
from rally.config.errors import shown
from rally.config.verl_key_tables import HINTS, SFT_HINTS, Hint, hint_for

HEAD = """\
# Configuration keys

This page is generated from the schema by `python docs/make_keys.py > docs/keys.md`; a test compares the two.
[config.md](config.md) describes how keys are written, merged and checked.

Every key is in one of three lists:

- *Supported keys* have the described effect. Some are accepted for compatibility only, and say so.
- *Keys with fixed values* are choices in other trainers. Rally accepts only the values shown.
- *Keys that are not supported yet* accept only their default. Any other value is an error that says what to do.
"""
TYPES = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    types.NoneType: "null",
    Any: "any",
}
BOUNDS = (("gt", "> {}"), ("ge", ">= {}"), ("lt", "< {}"), ("le", "<= {}"))


class Key(NamedTuple):
    name: str
    hint: Any
    field: FieldInfo


def keys(section: type[Section], prefix: str = "") -> Iterator[Key]:
    """Every key that is not a section, by its full dotted name."""
    hints = get_type_hints(section, include_extras=True)
    for name, field in section.model_fields.items():
        hint = hints[name]
        if isinstance(hint, type) and issubclass(hint, Section):
            yield from keys(hint, f"{prefix}{name}.")
        else:
            yield Key(prefix + name, hint, field)


def kind(hint: Any) -> str:
    """The type of a key, as the page shows it."""
    if hint == base.Limit:
        return "whole number >= 1, or -1"
    if hint in (base.Files, base.Texts):
        return "text, or a list of texts"
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{kind(parts[0])} {' and '.join(_bounds(parts[1:]))}".rstrip()
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(kind, parts))).replace("true or false or", "true, false or")
    if origin is tuple:
        return f"list of {kind(parts[0])}".replace("number", "numbers")
    return "mapping" if origin is dict or issubclass(hint, Section) else TYPES[hint]


def _bounds(marks: Sequence[Any]) -> Iterator[str]:
    limits = [m for mark in marks for m in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
    yield from (text.format(getattr(mark, name)) for mark in limits for name, text in BOUNDS if hasattr(mark, name))


def only(hint: Any) -> Only | None:
    return next((mark for mark in get_args(hint) if isinstance(mark, Only)), None)


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return f"`{shown(value)}`"


def rule_for(name: str, rules: Sequence[Unsupported]) -> Unsupported | None:
    return next((rule for rule in rules if name == rule.key or name.startswith(rule.key + ".")), None)


def _partly(key: Key, rule: Unsupported) -> bool:
    """Whether some values of this key are supported besides its default."""
    return bool(rule.supported) and rule.key == key.name


def allowed(key: Key, rule: Unsupported | None) -> str:
    """The type of a key; for a key with unsupported choices, the supported ones."""
    if rule is None:
        return kind(key.hint)
    values = dict.fromkeys([*_flat(key.field.get_default(call_default_factory=True)), *rule.supported])
    return ", ".join(f"`{shown(value)}`" for value in values)


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)


def page(title: str, schema: type[Root], rules: Sequence[Unsupported], hints: Sequence[Hint]) -> Iterator[str]:
    idle = [(key, hint) for key in keys(schema) if (hint := hint_for(key.name, hints)) and not hint.values]
    every = [key for key in keys(schema) if key.name not in {hidden.name for hidden, _ in idle}]
    single = [key for key in every if only(key.hint)]
    unsupported = [key for key in every if (rule := rule_for(key.name, rules)) and not _partly(key, rule)]
    working = [key for key in every if key not in single and key not in unsupported]
    yield f"\n## {title}\n\n### Supported keys\n"
    yield from table(
        ("key", "type", "default", "description"),
        [
            (f"`{k.name}`", allowed(k, rule_for(k.name, rules)), default(k.field), k.field.description or "")
            for k in working
        ],
    )
    yield "\n### Keys with fixed values\n"
    marks = [(key, only(key.hint)) for key in single]
    yield from table(
        ("key", "accepted values", "reason"),
        [(f"`{k.name}`", ", ".join(f"`{shown(v)}`" for v in m.values), m.because) for k, m in marks if m],
    )
    yield "\n### Keys without effect\n"
    yield "Any value is accepted. A value other than the default is named in one note when the run starts.\n"
    yield from table(("key", "reason"), [(f"`{k.name}`", h.why) for k, h in idle])
    yield "\n### Keys that are not supported yet\n"
    ruled = [(key, rule_for(key.name, rules)) for key in unsupported]
    yield from table(
        ("key", "default", "what to do"), [(f"`{k.name}`", default(k.field), r.advice) for k, r in ruled if r]
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |"


def main() -> None:
    training = page("`rally train` and `rally eval`", Config, UNSUPPORTED, HINTS)
    lines = [HEAD.rstrip(), *training, *page("`rally sft`", SftConfig, SFT_UNSUPPORTED, SFT_HINTS)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
