"""verl's scores of programs (`prime_code`, `sandbox_fusion`): the share of test cases that pass.

Programs of the policy run in Rally's sandbox, or on the sandbox server that the caller names, never in this process. As
in verl, a case is True, False (another output), -1 (the sandbox failed), -2 (the program failed), -3 (too slow) or -4
(it does not compile). A sandbox that does not work raises SandboxError: verl scores it as a failed program.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

from rally.compat.verl.tools import run_case
from rally.rewards.score import RewardError
from rally.sandbox import Outcome, Program, SandboxSettings, shared_sandbox

Verdict = bool | Literal[-1, -2, -3, -4]
CASES = 10
CALL = """
import json as _json, sys as _sys
_arguments = [_json.loads(line) for line in _sys.stdin.read().split("\\n") if line]
_holder = Solution() if "Solution" in globals() else None
_function = getattr(_holder, {name!r}) if _holder is not None else globals()[{name!r}]
_value = _function(*_arguments)
print(_json.dumps(_value) if isinstance(_value, (dict, list, tuple, bool)) or _value is None else _value)
"""


def prime_code(completion: str, test_cases: Any, continuous: bool = False) -> tuple[Any, Any]:
    """Whether the program in the text passes all cases; with `continuous` the share of the first ten."""
    cases = _cases(test_cases)
    code = completion.split("```python")[-1].split("```")[0]
    verdicts, notes = run_test(cases, code, timeout=5)
    if all(verdict is True for verdict in verdicts):
        return True, notes
    if not continuous:
        return False, notes
    first = verdicts[:CASES]
    return sum(verdict is True for verdict in first) / max(1, len(first)), notes[:CASES]


def sandbox_fusion(
    sandbox_fusion_url: str,
    concurrent_semaphore: Any,
    memory_limit_mb: int,
    completion: str,
    test_cases: Any,
    continuous: bool = False,
    timeout: float = 10,
) -> tuple[float, list[Any]]:
    """The share of the cases that pass on a sandbox server; with `continuous` of the first ten."""
    code = fenced_code(completion)
    if code is None:
        return 0.0, [{"error": "Invalid completion (missing code block)"}]
    verdicts, notes = check_correctness(
        sandbox_fusion_url, _cases(test_cases), code, timeout, concurrent_semaphore, memory_limit_mb
    )
    counted = verdicts[:CASES] if continuous else verdicts
    return sum(verdict is True for verdict in counted) / max(1, len(counted)), notes


def fenced_code(completion: str) -> str | None:
    """The last Python block, else the first block of another kind."""
    if "```python" in completion:
        return completion.split("```python")[-1].split("```")[0]
    if "```" not in completion:
        return None
    block = completion.split("```")[1]
    first, newline, rest = block.partition("\n")
    return rest if newline and first.strip().isalpha() else block


def run_test(
    in_outs: Mapping[str, Any], test: str, debug: bool = False, timeout: float = 15
) -> tuple[list[Verdict], list[dict[str, Any]]]:
    """The verdict of each case in the local sandbox."""
    return _judge(None, in_outs, test, timeout, None)


def check_correctness(
    sandbox_fusion_url: str,
    in_outs: Mapping[str, Any],
    generation: str,
    timeout: float = 10,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int = 1024,
    language: str = "python",
) -> tuple[list[Verdict], list[dict[str, Any]]]:
    """The verdict of each case on a sandbox server."""
    with concurrent_semaphore or nullcontext():
        return _judge(sandbox_fusion_url, in_outs, generation, timeout, memory_limit_mb, language)


def _judge(
    url: str | None,
    in_outs: Mapping[str, Any],
    code: str,
    timeout: float,
    memory_mb: int | None,
    language: str = "python",
) -> tuple[list[Verdict], list[dict[str, Any]]]:
    name, asserts = in_outs.get("fn_name"), in_outs.get("assert_case") or []
    verdicts: list[Verdict] = []
    notes: list[dict[str, Any]] = []
    for number, (given, expected) in enumerate(zip(*_pairs(in_outs), strict=True)):
        program = code + CALL.format(name=name) if name else code
        program += f"\n{asserts[number]}" if number < len(asserts) else ""
        outcome = _run(url, program, _stdin(given), timeout, memory_mb, language)
        verdicts.append(-4 if verdicts and verdicts[-1] == -4 else _verdict(outcome, expected))
        run = outcome.run
        notes.append(
            {
                "case_index": number,
                "input": given,
                "expected_output": expected,
                "stdout": run.stdout if run else None,
                "stderr": run.stderr if run else None,
                "run_status": run.status if run else None,
            }
        )
    return verdicts, notes


def _run(url: str | None, code: str, stdin: str, timeout: float, memory_mb: int | None, language: str) -> Outcome:
    if url is not None:
        return run_case(url, code, stdin, timeout, memory_mb or 1024, language).outcome
    program = Program(code=code, language=language, timeout=timeout, stdin=stdin, memory_mb=memory_mb)
    return asyncio.run(shared_sandbox(SandboxSettings()).run(program))


def _verdict(outcome: Outcome, expected: Any) -> Verdict:
    if outcome.run is None:
        return -4
    if outcome.run.status == "TimeLimitExceeded":
        return -3
    if outcome.run.return_code:
        return -2
    return expected is None or same_output(outcome.run.stdout, expected)


def same_output(stdout: str, expected: Any) -> bool:
    """Whether the lines are equal but for white space at their ends, or equal as numbers."""
    wanted = expected if isinstance(expected, str) else json.dumps(expected)
    left, right = ([line.strip() for line in text.strip().split("\n") if line.strip()] for text in (stdout, wanted))
    return left == right or (len(left) == len(right) and all(map(_same_numbers, left, right)))


def _same_numbers(left: str, right: str) -> bool:
    try:
        pairs = list(zip(map(float, left.split()), map(float, right.split()), strict=True))
    except ValueError:
        return left == right
    return all(abs(a - b) <= 1e-8 + 1e-5 * abs(b) for a, b in pairs)


def _pairs(in_outs: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    asserts = in_outs.get("assert_case") or []
    given = in_outs.get("inputs") or [""] * len(asserts)
    expected = in_outs.get("outputs") or [None] * len(asserts)
    if len(given) != len(expected) or not given:
        raise RewardError(f"test cases need as many inputs as outputs, not {len(given)} and {len(expected)}")
    if asserts and len(asserts) != len(given):
        raise RewardError(f"test cases need as many inputs as assert_case, not {len(given)} and {len(asserts)}")
    return given, expected


def _stdin(given: Any) -> str:
    if isinstance(given, str):
        return given
    return "\n".join(json.dumps(part) for part in given) if isinstance(given, list) else json.dumps(given)


def _cases(test_cases: Any) -> Mapping[str, Any]:
    try:
        cases = json.loads(test_cases) if isinstance(test_cases, str) else test_cases
    except json.JSONDecodeError as error:
        raise RewardError(f"the test cases are no JSON text ({error}); correct the ground_truth") from None
    if not isinstance(cases, Mapping):
        raise RewardError("the test cases must be a mapping with inputs and outputs; correct the ground_truth")
    return cases
