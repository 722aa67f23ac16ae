"""Generates integer problems of difficulty 1 to 5, each with an answer computed in two independent ways.

Each family draws its numbers from a seeded generator and has a text, a formula and a program. The program is written
as an agent would write it. It is run in this process to check the formula, and again in the sandbox by the recipe.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple

Numbers = dict[str, int]


class Family(NamedTuple):
    """A family of problems: `draw` chooses the numbers, `text`, `plan` and `program` are templates for them, and
    `formula` computes the answer."""

    name: str
    topic: str
    level: int
    draw: Callable[[random.Random], Numbers]
    text: str
    plan: str
    program: str
    formula: Callable[..., int]


class CodeProblem(NamedTuple):
    family: str
    topic: str
    level: int
    question: str
    plan: str
    program: str
    answer: int


def draw_problem(family: Family, rng: random.Random) -> CodeProblem:
    """One problem, with the answer of the formula checked by the program."""
    numbers = family.draw(rng)
    answer = family.formula(**numbers)
    program = family.program.format(**numbers)
    printed = run_trusted(program)
    assert printed == str(answer), f"{family.name} {numbers}: the formula says {answer}, the program {printed}"
    question, plan = family.text.format(**numbers), family.plan.format(**numbers)
    return CodeProblem(family.name, family.topic, family.level, question, plan, program, answer)


def problems(rng: random.Random) -> Iterator[CodeProblem]:
    """An endless stream of problems, from each family in turn."""
    while True:
        for family in FAMILIES:
            yield draw_problem(family, rng)


def run_trusted(program: str) -> str:
    """The output of a program of this file. It is not sandboxed: never use it for other programs."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {"__name__": "program"})
    return printed.getvalue().strip()


def _ranges(**bounds: tuple[int, int]) -> Callable[[random.Random], Numbers]:
    return lambda rng: {name: rng.randint(*bound) for name, bound in bounds.items()}


def _coprime(rng: random.Random) -> Numbers:
    p, q, r = rng.sample([7, 9, 11, 13, 16, 17, 19, 23, 25, 29], 3)
    return {"p": p, "q": q, "r": r, "a": rng.randrange(1, p), "b": rng.randrange(1, q), "c": rng.randrange(1, r)}


def _two_steps(rng: random.Random) -> Numbers:
    a, b = sorted(rng.sample(range(2, 10), 2))
    return {"a": a, "b": b, "n": rng.randint(200, 5000)}


def _multiples(a: int, b: int, n: int) -> int:
    def series(step: int) -> int:
        count = (n - 1) // step
        return step * count * (count + 1) // 2

    return series(a) + series(b) - series(math.lcm(a, b))


def _power(a: int, k: int, m: int) -> int:
    return pow(a, k, m)


def _divisors(n: int) -> int:
    found, rest, p = 1, n, 2
    while p * p <= rest:
        power = 0
        while rest % p == 0:
            rest, power = rest // p, power + 1
        found, p = found * (power + 1), p + 1
    return found * (2 if rest > 1 else 1)


def _primes_of(m: int) -> list[int]:
    return [p for p in range(2, m + 1) if m % p == 0 and all(p % d for d in range(2, p))]


def _without_common_factor(n: int, m: int) -> int:
    primes = _primes_of(m)
    chosen = ((size, math.prod(some)) for size in range(len(primes) + 1) for some in combinations(primes, size))
    return sum((-1) ** size * (n // product) for size, product in chosen)


def _paths(a: int, b: int) -> int:
    return math.comb(a + b, a)


def _bounded_sums(n: int, m: int) -> int:
    rests = ((i, n - i * (m + 1)) for i in range(4))
    return sum((-1) ** i * math.comb(3, i) * math.comb(rest + 2, 2) for i, rest in rests if rest >= 0)


def _congruences(p: int, q: int, r: int, a: int, b: int, c: int) -> int:
    whole = p * q * r
    parts = (rest * (whole // m) * pow(whole // m, -1, m) for m, rest in ((p, a), (q, b), (r, c)))
    return sum(parts) % whole


def _fixed_points(n: int, k: int) -> int:
    free = n - k
    arranged: int = sum((-1) ** i * math.factorial(free) // math.factorial(i) for i in range(free + 1))
    return math.comb(n, k) * arranged % 1000


def _subsets(n: int, k: int, m: int) -> int:
    """Counts the ways to reach each (size, remainder), number by number."""
    ways = {(0, 0): 1}
    for number in range(1, n + 1):
        grown = dict(ways)
        for (size, rest), count in ways.items():
            place = (size + 1, (rest + number) % m)
            grown[place] = grown.get(place, 0) + count
        ways = grown
    return ways.get((k, 0), 0)


def _digit_sums(n: int, s: int) -> int:
    """Digit by digit: below a smaller digit than n has, the places that follow are free."""
    free = [[1] + [0] * s]
    for _ in str(n):
        free.append([sum(free[-1][max(0, total - 9) : total + 1]) for total in range(s + 1)])
    count, left = 0, s
    for place, digit in zip(reversed(range(len(str(n)))), map(int, str(n)), strict=True):
        count += sum(free[place][left - smaller] for smaller in range(min(digit, left + 1)))
        left -= digit
        if left < 0:
            return count
    return count + (left == 0)


def _lattice(n: int) -> int:
    """The number of lattice points in a circle (Gauss), computed from divisors."""
    return 1 + 4 * sum(n // (4 * i + 1) - n // (4 * i + 3) for i in range(n // 4 + 1))


def _stairs(n: int, m: int) -> int:
    """The number of ways with steps of 1 and m, summed over the number of long steps."""
    return sum(math.comb(n - long * (m - 1), long) for long in range(n // m + 1))


FAMILIES: tuple[Family, ...] = (
    Family(
        *("multiples", "integers", 1, _two_steps),
        "Find the sum of all positive integers below {n} that are divisible by {a} or by {b}.",
        "Each number below {n} can be tested directly.",
        "print(sum(x for x in range(1, {n}) if x % {a} == 0 or x % {b} == 0))",
        _multiples,
    ),
    Family(
        *("power", "number theory", 1, _ranges(a=(3, 99), k=(30, 400), m=(11, 997))),
        "Find the remainder when {a}^{k} is divided by {m}.",
        "I multiply by {a} again and again and keep only the remainder.",
        "x = 1\nfor _ in range({k}):\n    x = x * {a} % {m}\nprint(x)",
        _power,
    ),
    Family(
        *("divisors", "number theory", 2, _ranges(n=(500, 20000))),
        "How many positive divisors does {n} have?",
        "I count the numbers up to {n} that divide it.",
        "print(sum({n} % d == 0 for d in range(1, {n} + 1)))",
        _divisors,
    ),
    Family(
        *("coprime", "number theory", 2, _ranges(n=(200, 5000), m=(12, 400))),
        "How many integers from 1 to {n} have no common factor greater than 1 with {m}?",
        "The greatest common divisor with {m} must be 1.",
        "from math import gcd\nprint(sum(gcd(x, {m}) == 1 for x in range(1, {n} + 1)))",
        _without_common_factor,
    ),
    Family(
        *("paths", "combinatorics", 2, _ranges(a=(3, 11), b=(3, 11))),
        "A path on a grid starts at (0, 0), goes one unit right or one unit up at a time, and ends at ({a}, {b}). How "
        "many such paths are there?",
        "The number of ways to a point is the sum of those to its left and lower neighbour.",
        "ways = [1] * ({b} + 1)\nfor _ in range({a}):\n    for y in range(1, {b} + 1):\n"
        "        ways[y] += ways[y - 1]\nprint(ways[{b}])",
        _paths,
    ),
    Family(
        *("bounded sums", "combinatorics", 3, _ranges(n=(15, 60), m=(12, 40))),
        "How many ordered triples (x, y, z) of integers from 0 to {m} have x + y + z = {n}?",
        "For every x and y there is one z, which must lie between 0 and {m}.",
        "r = range({m} + 1)\nprint(sum(0 <= {n} - x - y <= {m} for x in r for y in r))",
        _bounded_sums,
    ),
    Family(
        *("congruences", "number theory", 3, _coprime),
        "Find the smallest non-negative integer that leaves the remainder {a} when divided by {p}, {b} when divided by "
        "{q}, and {c} when divided by {r}.",
        "I try one number after the other until all three remainders fit.",
        "x = 0\nwhile (x % {p}, x % {q}, x % {r}) != ({a}, {b}, {c}):\n    x += 1\nprint(x)",
        _congruences,
    ),
    Family(
        *("fixed points", "combinatorics", 4, _ranges(n=(8, 60), k=(0, 6))),
        "In N permutations of 1, 2, ..., {n} exactly {k} numbers stay in their place. Find the remainder when N is "
        "divided by 1000.",
        "I choose the {k} numbers that stay; none of the others may, and these arrangements follow a recursion.",
        "from math import comb\nd = [1, 0]\nfor i in range(2, {n} + 1):\n"
        "    d.append((i - 1) * (d[i - 1] + d[i - 2]))\nprint(comb({n}, {k}) * d[{n} - {k}] % 1000)",
        _fixed_points,
    ),
    Family(
        *("subsets", "combinatorics", 4, _ranges(n=(9, 15), k=(3, 5), m=(3, 9))),
        "How many subsets of {{1, 2, ..., {n}}} have exactly {k} elements whose sum is divisible by {m}?",
        "I list the subsets of {k} elements and test their sums.",
        "from itertools import combinations\n"
        "print(sum(sum(c) % {m} == 0 for c in combinations(range(1, {n} + 1), {k})))",
        _subsets,
    ),
    Family(
        *("digit sums", "integers", 4, _ranges(n=(200, 3000), s=(3, 20))),
        "How many integers from 1 to {n} have the digit sum {s}?",
        "I add the digits of every number up to {n}.",
        "print(sum(sum(map(int, str(x))) == {s} for x in range(1, {n} + 1)))",
        _digit_sums,
    ),
    Family(
        *("lattice", "number theory", 5, _ranges(n=(30, 3000))),
        "How many points (x, y) with integer coordinates have x^2 + y^2 <= {n}?",
        "I count the points of the square around the circle that lie inside it.",
        "from math import isqrt\nr = isqrt({n})\ns = range(-r, r + 1)\n"
        "print(sum(x * x + y * y <= {n} for x in s for y in s))",
        _lattice,
    ),
    Family(
        *("stairs", "combinatorics", 5, _ranges(n=(20, 60), m=(2, 5))),
        "A staircase has {n} steps. In how many ways can it be climbed if each stride takes either 1 or {m} steps?",
        "The ways to a step are those to the step before and those to the step {m} below.",
        "ways = [1]\nfor i in range(1, {n} + 1):\n"
        "    ways.append(ways[i - 1] + (ways[i - {m}] if i >= {m} else 0))\nprint(ways[{n}])",
        _stairs,
    ),
)
