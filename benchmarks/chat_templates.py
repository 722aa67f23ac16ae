"""Tries Rally on chat templates and prints a table: what is encoded, read back, appended and rendered again exactly.

    python benchmarks/chat_templates.py FOLDER... [--table docs/models.md] [--details]

Each FOLDER holds Jinja files, or tokenizers with a chat template. A Jinja file gets a tokenizer of bytes whose special
tokens are those that it contains; its model's stop tokens are in STOPS. With --table the table, and that of the
formats, are written between the markers of that file; rows of other folders stay. Third-party templates are not part of
this repository; the table names them.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rally.chat import ChatCodec, TemplateError, TemplateReport
from rally.chat.format_choice import TOOL, TOOL_NAME
from rally.chat.formats import ALIASES, FORMATS
from rally.chat.template_probe import CASES, first_difference, forms
from rally.chat.tiny_tokenizer import template_tokenizer
from rally.types import Message, RallyError, ToolCall

TEMPLATES, FORMAT_LIST = "templates", "formats"  # the tables, between <!-- NAME begin --> and <!-- NAME end -->
# End-of-text token, then further stop tokens, by a text in the template: what the models' generation configs say.
STOPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("<|tools_suffix|>", ("<|assistant_end|>", "<|tools_suffix|>")),
    ("<|end_of_msg|>", ("<|end_of_msg|>",)),
    ("<|return|>", ("<|return|>", "<|call|>")),
    ("<|tool_response>", ("<turn|>", "<|tool_response>")),
    ("<|observation|>", ("<|endoftext|>", "<|user|>", "<|observation|>")),
    ("<end_of_turn>", ("<end_of_turn>",)),
    ("<|eot_id|>", ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")),
    ("<|header_start|>", ("<|eot|>", "<|eom|>")),
    ("<|eot|>", ("<|eot|>",)),
    ("<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",)),
    ("<｜Assistant｜>", ("<｜end▁of▁sentence｜>",)),
    ("<|im_end|>", ("<|im_end|>",)),
    ("<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",)),
    ("<|end_of_role|>", ("<|end_of_text|>",)),
    ("<seed:eos>", ("<seed:eos>",)),
    ("[e~[", ("[e~[",)),
    ("<end_of_sentence>", ("<end_of_sentence>",)),
    ("<SPECIAL_12>", ("<SPECIAL_12>",)),
    ("`function call`", ("</s>",)),  # GigaChat 3: a call follows <|message_sep|> in the same turn
    ("<|message_sep|>", ("<|message_sep|>",)),
    ("<|tool_result|>", ("</s>",)),
    ("<|calls|>", ("<|flush|>", "<|calls|>")),
    ("{% else %}{{ eos_token }}", ("<|endoftext|>", "<|end|>")),
    ("<|end|>", ("<|end|>",)),
    ("<|extra_0|>", ("<|eos|>",)),
    ("</assistant>", ("</assistant>",)),
    ("<sep>", ("<sep>",)),
    ("hy_eos", ("<｜hy_eos:opensource｜>",)),
)


# Formats of templates that neither show calls nor mention their marks, by a text in the template.
NAMED = (("<|tool_list_start|>", "lfm2"), ("List of tools: ", "lfm2"), ("xml_tools", "hermes"))


class Row(NamedTuple):
    """The result for one template. `status` is one of BEST."""

    name: str
    format: str
    encode: str
    parse: str
    delta: str
    rerender: str
    status: str
    reason: str = ""


def tokenizers(folder: Path) -> list[tuple[str, PreTrainedTokenizerBase]]:
    if (folder / "tokenizer_config.json").is_file():
        return [(folder.name, AutoTokenizer.from_pretrained(folder))]
    inside = [one for path in sorted(folder.iterdir()) if path.is_dir() for one in tokenizers(path)]
    for file in sorted([*folder.glob("*.jinja"), *folder.glob("*.jinja2")]):
        source = file.read_text(encoding="utf-8")
        eos, *more = next((stops for mark, stops in STOPS if mark in source), ("</s>",))
        inside.append(
            (f"{folder.name}/{file.name.rpartition('.jinja')[0]}", template_tokenizer(source, eos, stops=more))
        )
    return inside


# Arguments of templates that decide about thinking (data.apply_chat_template_kwargs).
OPTIONS: tuple[dict[str, bool], ...] = (
    *({"clear_thinking": False}, {"truncate_history_thinking": False}, {"preserve_thinking": True}),
    *({"keep_thinking": True}, {"keep_past_thinking": True}, {"enable_thinking": True}, {"enable_thinking": False}),
    *({"thinking": True}, {"drop_thinking": False}),
)
BEST = ("exact", "rerender", "append", "warned", "text", "refused")


def row_of(name: str, tokenizer: PreTrainedTokenizerBase) -> Row:
    """Try one template, without arguments and with those that it reads; the best result."""
    source = str(tokenizer.chat_template)
    rows = [try_template(name, tokenizer, {})]
    for options in OPTIONS:
        if rows[-1].status != "exact" and all(re.search(rf"\b{key}\b", source) for key in options):
            words = ", ".join(f"{key}={str(value).lower()}" for key, value in options.items())
            rows.append(try_template(f"{name}, {words}", tokenizer, options))
    return min(rows, key=lambda row: BEST.index(row.status))


def try_template(name: str, tokenizer: PreTrainedTokenizerBase, options: dict[str, bool]) -> Row:
    """Try one template. Never raises for a template's own failure: that is a refusal with its reason."""
    known: Any = tokenizer.get_vocab()
    first = next((group for mark, group in STOPS if mark in str(tokenizer.chat_template)), ())
    stops = [known[one] for one in first if one in known]
    tool_format = next((one for mark, one in NAMED if mark in str(tokenizer.chat_template)), "auto")
    try:
        codec = ChatCodec(tokenizer, tool_format, tools=[TOOL], stop_ids=stops, template_kwargs=options)
        report = codec.probe()
    except RallyError as refusal:
        return Row(name, "", "refused", "", "", "", "refused", first_sentence(refusal))
    if problem := codec.format_problem():
        return Row(name, "", "exact", "refused", "", "", "refused", first_sentence(problem))
    if not codec._format_choice.rendered and not codec._template.writes_calls:
        return text_row(name, codec, report)
    parse = codec._format_choice.reading(codec.format) or "written by the format"
    delta = "exact" if report.append_only else "tools" if not tool_differences(report) else "differs"
    problem = rerender_problem(codec)
    refusals = report.refusal("append", tools=True, users=False), report.refusal("rerender", tools=True, users=False)
    delta = "refused" if refusals[0] else delta
    rerender = "refused" if refusals[1] else "exact" if not problem else "differs"
    status, reason = "exact", ""
    if delta != "exact" or parse == "plain words":
        status = "rerender" if rerender == "exact" else "append" if delta == "tools" else "warned"
        status = "refused" if all(refusals) else status
        reason = "; ".join(filter(None, (next(iter(case.case for case in report.differences), ""), problem)))
        if status == "refused":
            reason = refusals[0] or reason
    return Row(name, codec.format.name, "exact", parse, delta, rerender, status, first_sentence(reason))


def tool_differences(report: TemplateReport) -> list[str]:
    """The differences inside a tool loop, before another user turn."""
    return [one.case for one in report.differences if CASES[one.case][-1]["role"] == "tool"]


def text_row(name: str, codec: ChatCodec, report: TemplateReport) -> Row:
    """A template that shows no calls: is it exact for conversations of text?"""
    differs = [one.case for one in report.differences if not any(m.get("tool_calls") for m in CASES[one.case])]
    delta = "differs" if differs else "exact"
    return Row(name, "", "exact", "no calls shown", delta, "", "text", differs[0] if differs else "")


def rerender_problem(codec: ChatCodec) -> str:
    """Whether parsed replies render as the replies themselves do, but for spaces; the first case where they do not."""
    turns = codec._turns
    for case, messages in CASES.items():
        if "thinking" in case and turns.thinking_closed:
            continue
        problem = ""
        for form in forms(turns, [_with_tool(m) for m in messages]):
            problem = _rerendered(codec, form)
            if not problem:
                break
        if problem:
            return f"{case}: {problem}"
    return ""


def _rerendered(codec: ChatCodec, messages: Sequence[Message]) -> str:
    meant, again, calls = [], [], []
    try:
        for message in messages:
            if message["role"] == "assistant":
                parsed = codec.parse(codec.encode_assistant(message))
                good = [call for call in parsed.tool_calls if call.error is None]
                if len(good) != len(message.get("tool_calls", ())):
                    return "the call is not read back"
                pairs = zip(message.get("tool_calls", ()), parsed.tool_calls, strict=False)
                calls = [{**call, "id": one.id} for call, one in pairs]
                meant.append({**message, "tool_calls": list(calls)} if calls else message)
                again.append(codec.message(parsed))
                continue
            if message["role"] == "tool" and calls:
                message = {**message, "tool_call_id": calls[0]["id"]}
            meant.append(message)
            again.append(message)
        expected, got = (codec.decode(codec.render(one, generation_prompt=True)) for one in (meant, again))
    except TemplateError as refusal:
        return str(refusal)
    same = "".join(expected.split()) == "".join(got.split())
    return "" if same else f"rendered otherwise: {first_difference(expected, got)}"


def _with_tool(message: Message) -> Message:
    """The message with calls of the known tool."""
    function = {"name": TOOL_NAME, "arguments": {"query": "x"}}
    if message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "function": function} for call in message["tool_calls"]]}
    return {**message, "name": TOOL_NAME} if message["role"] == "tool" else message


def first_sentence(text: object) -> str:
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|")[:160]


def table(lines: Sequence[str]) -> str:
    counts = Counter(line.split(" | ")[-1].strip(" |").partition(":")[0] for line in lines)
    words = ", ".join(f"{counts[status]} {meaning}" for status, meaning in MEANINGS.items() if counts[status])
    head = ["| template | format | parse | delta | rerender | result |", "| --- | --- | --- | --- | --- | --- |"]
    return "\n".join([f"{len(lines)} templates: {words}.", "", *head, *lines])


def line_of(row: Row) -> str:
    named = row.format and f"`{row.format}`"
    result = f"{row.status}: {row.reason}" if row.reason else row.status
    return f"| {row.name} | {named} | {row.parse} | {row.delta} | {row.rerender} | {result} |"


def format_table() -> str:
    """Every format, its other names, and how it writes the call f(a="x", n=1)."""
    lines = ["| format | also | a call |", "| --- | --- | --- |"]
    for name, one in FORMATS.items():
        aliases = ", ".join(f"`{alias}`" for alias, target in ALIASES.items() if target == name)
        call = ToolCall(name="f", arguments={"a": "x", "n": 1}, id=one.call_id("f", 0))
        written = one.render([call]).replace("\n", "↵").replace("|", "\\|")
        lines.append(f"| `{name}` | {aliases} | `` {written} `` |")
    return "\n".join(lines)


MEANINGS = {
    "exact": "exact",
    "rerender": "exact with history=rerender",
    "append": "exact inside a tool loop",
    "warned": "that render earlier turns otherwise, with a warning",
    "text": "without tool calls",
    "refused": "refused",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--table", type=Path, help="The file whose table is replaced.")
    parser.add_argument("--only", help="A part of the names to try.")
    parser.add_argument("--details", action="store_true", help="Print the probe's report too.")
    options = parser.parse_args()
    rows = []
    for folder in options.folders:
        for name, tokenizer in tokenizers(folder):
            if options.only and options.only not in name:
                continue
            rows.append(row_of(name, tokenizer))
            if options.details:
                print(rows[-1])
                try:
                    print(ChatCodec(tokenizer, tools=[TOOL]).probe().words)
                except RallyError as refusal:
                    print(refusal)
    lines = [line_of(row) for row in rows]
    if options.table is None:
        print(table(lines))
        return
    names = tuple(f"| {folder.resolve().name}/" for folder in options.folders)
    known = table_in(options.table, TEMPLATES).splitlines()
    others = [line for line in known if re.match(r"\| [\w.-]+/", line) and not line.startswith(names)]
    replace_table(options.table, TEMPLATES, table([*others, *lines]))
    replace_table(options.table, FORMAT_LIST, format_table())


def table_in(file: Path, name: str) -> str:
    return file.read_text(encoding="utf-8").partition(f"<!-- {name} begin -->")[2].partition(f"<!-- {name} end -->")[0]


def replace_table(file: Path, name: str, written: str) -> None:
    begin, end = f"<!-- {name} begin -->", f"<!-- {name} end -->"
    text = file.read_text(encoding="utf-8")
    file.write_text(f"{text.partition(begin)[0]}{begin}\n{written}\n{end}{text.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
