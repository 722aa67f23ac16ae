"""Base classes and field types of the configuration schema.

Every section is frozen, rejects unknown keys, and describes each key in the docstring below its field. `Only(...)`
marks a key of verl for which Rally supports some values only. Keys that are typed but not built yet are listed in
`checks/unsupported.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from rally.redact import redact_tree


class Section(BaseModel):
    """One mapping of the configuration."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_section(cls, value: Any) -> Any:
        # `trainer:` with nothing below it is how YAML writes an empty section.
        return {} if value is None else value

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Each key that is not a section, with its full dotted name."""
        for name, value in self:
            key = prefix + name
            if isinstance(value, Section):
                yield from value.leaves(key + ".")
            else:
                yield key, value

    @classmethod
    def keys(cls, prefix: str = "") -> Iterator[str]:
        """The dotted name of every key and section the schema knows."""
        for name, field in cls.model_fields.items():
            yield prefix + name
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                yield from field.annotation.keys(prefix + name + ".")

    @classmethod
    def sections(cls, prefix: str = "") -> Iterator[str]:
        """The dotted name of every section the schema knows."""
        for name, field in cls.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                yield prefix + name
                yield from field.annotation.sections(prefix + name + ".")


class Root(Section):
    """A whole configuration, as `load_config` and `load_sft_config` return it."""

    def flat(self) -> dict[str, Any]:
        """Every key by its full dotted name; mappings with free keys are not flattened."""
        return dict(self.leaves())

    def to_yaml(self) -> str:
        """The configuration as YAML, with every default. Loading it gives an equal configuration.

        Secrets that came from the environment are written as `${oc.env:NAME}`, others as `***`.
        """
        tree = redact_tree(_escaped(self.model_dump(mode="json")))
        return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)

    def first_set(self, keys: tuple[str, ...]) -> Any:
        """The value of the first of these keys that is not None."""
        return next((value for key in keys if (value := look_up(self, key)) is not None), None)


def look_up(config: Section, key: str) -> Any:
    """The value or section at a dotted key of the schema."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes the texts that OmegaConf would load as booleans or numbers. Wrapping the tree in OmegaConf is slow."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="'" if _BOOL.fullmatch(text) or _number(text) else None
    )


_BOOL = re.compile("y|Y|yes|Yes|YES|n|N|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF")
_Dumper.add_representer(str, _represent_str)


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _escaped(value: Any) -> Any:
    """The value with `${` escaped, so that literal text is not read as an interpolation."""
    if isinstance(value, dict):
        return {k: _escaped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escaped(v) for v in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


class Only:
    """Marks a key that accepts only `values`; `because` gives the reason in the error message."""

    def __init__(self, *values: object, because: str) -> None:
        self.values, self.because = values, because

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        # The order of a list such as save_contents does not matter.
        same = [v for v in self.values if v == value or (isinstance(v, tuple) and set(v) == set(value))]
        if not same:
            raise PydanticCustomError("only", "{because}", {"because": self.because})
        return same[0]


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("must", "a number")
    return value


def _all_or_some(value: int) -> int:
    if value != -1 and value < 1:
        raise PydanticCustomError("must", "-1 or at least 1")
    return value


def _listed(value: Any) -> Any:
    if value is None:
        return ()
    return value if isinstance(value, (list, tuple)) else (value,)


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def expand(path: str) -> str:
    """The path with `~` and `$VARIABLES` replaced."""
    return os.path.expanduser(os.path.expandvars(path))


def missing_file(path: str) -> bool:
    """Whether no file or folder exists at the path."""
    return not Path(path).exists()


Int = Annotated[int, BeforeValidator(_not_bool)]
Float = Annotated[float, BeforeValidator(_not_bool)]
Count = Annotated[Int, Field(ge=1)]
Natural = Annotated[Int, Field(ge=0)]
Limit = Annotated[Int, AfterValidator(_all_or_some)]
"""A count, or -1 for all or never."""
Positive = Annotated[Float, Field(gt=0)]
NonNegative = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
PathText = Annotated[str, BeforeValidator(_as_text), AfterValidator(expand)]
Files = Annotated[tuple[PathText, ...], BeforeValidator(_listed)]
"""One path or a list of them."""
Texts = Annotated[tuple[str, ...], BeforeValidator(_listed)]
"""One text or a list of them."""
AsList = BeforeValidator(_listed)
