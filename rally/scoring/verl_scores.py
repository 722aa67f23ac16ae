r"""The scores of verl 0.9 for its data sources, equal to verl's in every case.

Rally's own scores (`gsm8k`, `math_answers`, `exact_match`) compare numbers by value. These compare text, as verl does:
a run that was tuned with verl gets the same rewards, and `#### 72.0` is not `72`. What counts as equal is the
normalization of Minerva (Lewkowycz et al., 2022, appendix D.1) for `math_dapo` and that of the MATH data set
(Hendrycks et al., 2021) for `math`, with all their quirks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rally.scoring.answer_extraction import braced, last_tagged
from rally.scoring.exact_match import MANY_ANSWERS, normalise

WINDOW = 300
BOX_WINDOW = 100
NO_ANSWER = "[INVALID]"  # verl's `pred` where there is no answer


def gsm8k_answer(text: str, method: str = "strict") -> str | None:
    """The text after the last `#### ` (strict), or the last number, comma or dot (flexible). None if there is none."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"the gsm8k method must be strict or flexible, not {method!r}")
    found: list[str] = re.findall(("#### " if method == "strict" else "") + r"(-?[0-9.,]+)", text[-WINDOW:])
    if not found:
        return None
    if method == "strict":
        return found[-1].replace(",", "")
    return next((number for number in reversed(found) if number != "."), ".")


def gsm8k(text: str, truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0) -> float:
    """`score` for the same text, `format_score` for another answer, 0 for none."""
    return _paid(gsm8k_answer(text, method), lambda answer: answer == truth, format_score, score)


def search(text: str, targets: Sequence[str], format_score: float = 0.0, score: float = 1.0) -> float:
    """`score` for an exact match, a quarter of it with more than ten tags, `format_score` for another answer."""
    many = max(text.count("<answer>"), text.count("</answer>")) > MANY_ANSWERS
    accepted = {normalise(target) for target in targets}
    return _paid(
        last_tagged(text), lambda answer: normalise(answer) in accepted, format_score, score / 4 if many else score
    )


def search_contains(text: str, targets: Sequence[str], format_score: float = 0.0, score: float = 1.0) -> float:
    """`score` if an accepted answer is a substring of the answer, `format_score` for another answer, 0 for none."""
    accepted = [normalise(target) for target in targets]
    return _paid(last_tagged(text), lambda answer: any(t in normalise(answer) for t in accepted), format_score, score)


def _paid(answer: str | None, is_right: Callable[[str], bool], format_score: float, score: float) -> float:
    if answer is None:
        return 0.0
    return score if is_right(answer) else format_score


class DapoGrade(NamedTuple):
    right: bool
    answer: str | None


def math_dapo(text: str, truth: str, strict_box: bool = False, pauses: Sequence[int] | None = None) -> DapoGrade:
    """Grade the last `Answer:` in the last 300 characters. If there is none, or with `strict_box`, the last box in the
    last 100 is compared letter by letter. `pauses` are the positions of pause tokens; the box is searched from 100
    characters before the last one."""
    text = text[-WINDOW:]
    if not strict_box:
        lines: list[str] = re.findall(r"answer\s*:\s*([^\n]+)", text, re.IGNORECASE)
        answer = minerva_form(lines[-1]) if lines else NO_ANSWER
        if answer != NO_ANSWER:
            return DapoGrade(answer == minerva_form(truth), answer)
    end = text[-BOX_WINDOW:] if pauses is None else text[pauses[-1] - BOX_WINDOW :]
    boxed = braced(end, end.rfind(r"\boxed{"))
    if boxed is None and not strict_box:
        return DapoGrade(minerva_form(truth) == NO_ANSWER, NO_ANSWER)
    return DapoGrade(boxed == truth, boxed)


# Minerva's rewriting steps, in order; then the words and marks that it removes, in order.
_REWRITTEN = {
    "an ": "",
    "a ": "",
    ".$": "$",
    r"\$": "",
    "\\ ": "",
    " ": "",
    "mbox": "text",
    r",\text{and}": ",",
    r"\text{and}": ",",
    r"\text{m}": r"\text{}",
}
_REMOVED = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm "
    "gm pounds meters meals edges students childrentickets multiples \\text{s} \\text{.} \\text{\ns} \\text{}^2 "
    '\\text{}^3 \\text{\n} \\text{} \\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'
)


def minerva_form(answer: str) -> str:
    """The answer as Minerva normalizes it."""
    text = answer.rpartition("=")[2]
    for written, form in (*_REWRITTEN.items(), *((word, "") for word in _REMOVED.split(" "))):
        text = text.replace(written, form)
    text = "\n".join(_first_formula(line) for line in text.split("\n"))
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def _first_formula(line: str) -> str:
    """The first `$...$` of a line, if it has one; else the line."""
    parts = line.split("$", 2)
    return f"${parts[1]}$" if len(parts) == 3 else line


def math(text: str, truth: str) -> bool:
    r"""Whether the last `\boxed{}` of the text, or what follows `\boxed `, is the truth."""
    _, bare, after = text.rpartition("\\boxed ")
    answer = after.partition("$")[0] if bare else _last_box(text)
    if answer is None:
        return False
    left, right = math_form(answer), math_form(truth)
    return answer == truth if left is None or right is None else left == right


def _last_box(text: str) -> str | None:
    at = text.rfind(r"\boxed")
    return braced(text, at) if text.startswith(r"\boxed{", at) else None


_MATH_REWRITTEN = {
    "\n": "",
    r"\!": "",
    "\\\\": "\\",
    "tfrac": "frac",
    "dfrac": "frac",
    r"\left": "",
    r"\right": "",
    r"^{\circ}": "",
    r"^\circ": "",
    r"\$": "",
}


def math_form(answer: str) -> str | None:
    r"""The answer as the MATH data set normalizes it. None if it cannot be: two units, or an unfinished `\frac`."""
    text = answer
    for written, form in _MATH_REWRITTEN.items():
        text = text.replace(written, form)
    text, unit, rest = text.partition(r"\text{ ")
    if unit and r"\text{ " in rest:
        return None
    text = text.replace("\\\\%", "").replace(r"\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return ""
    text = "0" + text if text.startswith(".") else text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    roots = text.split(r"\sqrt")
    if not all(roots[1:]):
        return None
    text = r"\sqrt".join([roots[0], *(r if r[0] == "{" else f"{{{r[0]}}}{r[1:]}" for r in roots[1:])])
    whole = _braced_fractions(text.replace(" ", ""))
    if whole is None or whole == "0.5":
        return whole and r"\frac{1}{2}"
    ratio = re.fullmatch(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)", whole)
    return rf"\frac{{{ratio[1]}}}{{{ratio[2]}}}" if ratio else whole


def _braced_fractions(text: str) -> str | None:
    r"""`\frac12` as `\frac{1}{2}` and `\frac1{72}` as `\frac{1}{72}`. The text itself if one has no denominator, None
    if one has nothing at all."""
    first, *rest = text.split(r"\frac")
    parts = [first]
    for part in rest:
        if not part:
            return None
        if part[0] != "{" and len(part) == 1:
            return text
        if part[0] != "{":
            part = f"{{{part[0]}}}{part[1:]}" if part[1] == "{" else f"{{{part[0]}}}{{{part[1]}}}{part[2:]}"
        parts.append(part)
    return r"\frac".join(parts)
