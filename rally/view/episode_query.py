"""Queries over the episode table: filters, sorting and keyset pagination.

The cost of a page does not grow with the rows before it, and every filter is a bound SQL parameter. A query is written
as in the page's links: `step=10..20&kind=val&reward=..0.5&stop=length,error&text=12*34`.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rally.types import RallyError
from rally.view.episode_index import spaced

PAGE = 100  # rows
MOST_ROWS = 1000

SHOWN = (
    "id", "step", "validate", "baseline", "grp", "task", "source", "reward", "stop", "turns", "calls", "errors",
    "sampled", "tokens", "seconds", "question", "answer",
)  # fmt: skip
SORTS = {name: name for name in SHOWN} | {"reward": "ifnull(reward, -9e999)"}
RANGES = ("step", "reward", "turns", "calls", "tokens", "seconds")
EXACT = {"group": "grp", "task": "task", "source": "source", "id": "id"}
_WORD = re.compile(r'"([^"]*)"|(\S+)')


class QueryError(RallyError):
    """An invalid filter."""


class Condition(NamedTuple):
    sql: str
    values: tuple[Any, ...]


class QueryPage(NamedTuple):
    """Rows in order, and the key of the next page; None at the end."""

    rows: list[dict[str, Any]]
    next: str | None


class Neighbours(NamedTuple):
    """The number of rows before an episode, and its neighbours; empty if it is not in the table."""

    at: int | None = None
    before: str | None = None
    after: str | None = None


@dataclass(frozen=True)
class Query:
    """The filter and the sort order."""

    conditions: tuple[Condition, ...] = ()
    sort: str = "step"
    descending: bool = True

    @classmethod
    def parse(cls, params: Mapping[str, str]) -> Query:
        """Parse the parameters of a link. An unknown name is an error, so that a typo does not silently change the
        filter."""
        known = {*RANGES, *EXACT, "kind", "stop", "errors", "text", "sort", "desc"}
        if unknown := sorted(params.keys() - known):
            raise QueryError(f"there is no filter {', '.join(unknown)}; the filters are {', '.join(sorted(known))}")
        found = [_range(name, params[name]) for name in RANGES if params.get(name)]
        found += [Condition(f"{column} = ?", (params[name],)) for name, column in EXACT.items() if params.get(name)]
        found += [_kind(params["kind"])] if params.get("kind") else []
        if stops := [stop for stop in params.get("stop", "").split(",") if stop]:
            found.append(Condition(f"stop IN ({', '.join('?' * len(stops))})", tuple(stops)))
        if params.get("errors") not in (None, "", "0"):
            found.append(Condition("errors > 0", ()))
        if match := _match(params.get("text", "")):
            found.append(Condition("n IN (SELECT rowid FROM words WHERE words MATCH ?)", (match,)))
        sort = params.get("sort") or "step"
        if sort not in SORTS:
            raise QueryError(f"cannot sort by {sort}; the columns are {', '.join(SORTS)}")
        return cls(tuple(found), sort, params.get("desc", "1") != "0")

    def count(self, db: sqlite3.Connection) -> int:
        where, values = self._where()
        return int(db.execute(f"SELECT count(*) FROM episodes {where}", values).fetchone()[0])

    def page(self, db: sqlite3.Connection, after: str | None = None, skip: int = 0, limit: int = PAGE) -> QueryPage:
        """The rows that follow the key `after`, without the first `skip` of them."""
        limit = min(limit, MOST_ROWS)
        key, order = SORTS[self.sort], "DESC" if self.descending else "ASC"
        place = () if after is None else (_after(key, after, "<" if self.descending else ">"),)
        where, values = self._where(*place)
        rows = db.execute(
            f"SELECT {', '.join(SHOWN)}, {key} AS sort_key, n FROM episodes {where} "
            f"ORDER BY sort_key {order}, n {order} LIMIT ? OFFSET ?",
            (*values, limit, skip),
        ).fetchall()
        last = rows[-1][-2:] if len(rows) == limit else None
        return QueryPage([dict(zip(SHOWN, row, strict=False)) for row in rows], last and _key(*last))

    def beside(self, db: sqlite3.Connection, name: str) -> Neighbours:
        """The position of an episode in the table now. Positions change while a run adds rows."""
        key = SORTS[self.sort]
        where, values = self._where(Condition("id = ?", (name,)))
        own = db.execute(f"SELECT {key}, n FROM episodes {where}", values).fetchone()
        if own is None:
            return Neighbours()
        here, back = _key(*own), replace(self, descending=not self.descending)
        where, values = self._where(_after(key, here, ">" if self.descending else "<"))
        (at,) = db.execute(f"SELECT count(*) FROM episodes {where}", values).fetchone()
        before, after = (query.page(db, here, limit=1).rows for query in (back, self))
        return Neighbours(at, before[0]["id"] if before else None, after[0]["id"] if after else None)

    def _where(self, *more: Condition) -> tuple[str, list[Any]]:
        conditions = self.conditions + more
        sql = " AND ".join(condition.sql for condition in conditions)
        return f"WHERE {sql}" if sql else "", [value for condition in conditions for value in condition.values]


def _range(name: str, text: str) -> Condition:
    low, dots, high = text.partition("..")
    bounds = [_number(name, low), _number(name, high)] if dots else [_number(name, text)] * 2
    parts = [(f"{name} {sign} ?", bound) for sign, bound in zip((">=", "<="), bounds, strict=True) if bound is not None]
    return Condition(" AND ".join(sql for sql, _ in parts) or "1", tuple(bound for _, bound in parts))


def _number(name: str, text: str) -> float | None:
    if not text.strip():
        return None
    try:
        return float(text)
    except ValueError:
        raise QueryError(f"{name}={text} is not a number; write a number, or a range such as 10..20") from None


def _kind(kind: str) -> Condition:
    if kind not in ("train", "val"):
        raise QueryError(f"kind={kind} is unknown; it is train or val")
    return Condition("validate = ?", (int(kind == "val"),))


def _match(text: str) -> str:
    """The full-text query: all words must match, the last one as a prefix; "two words" in quotes are a phrase."""
    words = [quoted or word for quoted, word in _WORD.findall(text.replace("\0", " "))]
    phrases = ['"' + spaced(word).strip().replace('"', '""') + '"' for word in words if re.search(r"\w", word)]
    return " AND ".join(phrases) + ("*" if phrases and not text.endswith(('"', " ")) else "")


def _after(key: str, after: str, sign: str) -> Condition:
    try:
        value, n = json.loads(after)
    except ValueError:
        raise QueryError(f"after={after} is not a key that a page of rows ended with") from None
    value = -math.inf if value is None else value
    return Condition(f"({key}, n) {sign} (?, ?)", (value, n))


def _key(value: Any, n: int) -> str:
    return json.dumps([None if value == -math.inf else value, n])
