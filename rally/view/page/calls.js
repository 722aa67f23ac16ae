// What became of the calls of a turn: each is a card with its arguments, its result and how it ended.

import { clip, h, number, seconds } from "./dom.js";
import { longText } from "./tokens.js";

function argumentsText(call) {
  const pairs = Object.entries(call.arguments ?? {});
  return pairs
    .map(([name, value]) => name + ": " + (typeof value === "string" ? value : JSON.stringify(value)))
    .join("\n");
}

// What the policy wrote: of a call that could not be read its text, and beside it what the parser said.
function written(call) {
  if (!call.error) return [["arguments", argumentsText(call) || "none"]];
  return [
    ["written", call.raw || "(its text was not recorded)"],
    ["error", call.error],
  ];
}

function card(call, [tone, status], facts, rows) {
  return h(
    "div",
    { class: "call" },
    h(
      "header",
      null,
      h("code", null, clip(call?.name ?? "") || "(no name)"),
      h("span", { class: "chip " + tone }, status),
      h("span", { class: "soft" }, facts.filter(Boolean).join(" · ")),
    ),
    h(
      "dl",
      null,
      rows.map(([name, text]) => [
        h("dt", null, name),
        h("dd", { class: name === "error" ? "bad" : null }, longText(text, "value")),
      ]),
    ),
  );
}

function resultCard(result) {
  const { call, status } = result;
  const facts = [
    result.seconds > 0 ? seconds(result.seconds) : null,
    result.queued > 0.001 ? "waited " + seconds(result.queued) : null,
    result.cached ? "from memory" : null,
    result.truncated ? "answer cut" : null,
    result.reward === null ? null : "reward " + number(result.reward),
  ];
  const told = result.response.text ?? (result.response.image ? "an image" : "");
  const rows = written(call);
  if (!call.error || !told.includes(call.error)) rows.push([call.error ? "told" : "result", told]);
  return card(call, [status === "ok" ? "good" : "bad", status], facts, rows);
}

const answerCard = ({ call, text }) =>
  card(call, ["", "run by the agent"], [], [...(call ? written(call) : []), ["result", text]]);

const openCard = (call) => card(call, call.error ? ["bad", "malformed"] : ["warn", "not answered"], [], written(call));

// The turns that come directly after one: in its segment, and in segments that continue it.
function following(one, turn) {
  const own = one.turns.filter((other) => other.segment === turn.segment);
  const next = own[own.indexOf(turn) + 1];
  const at = one.segments[turn.segment]?.prompt_ids.length + turn.end;
  const branches = one.segments.flatMap(({ continues }, n) =>
    continues?.kind === "branch" && continues.segment === turn.segment && continues.shared === at
      ? one.turns.filter((other) => other.segment === n).slice(0, 1)
      : [],
  );
  return [...(next ? [next] : []), ...branches];
}

// Loops that return no results leave the text of their tool turn alone, and records of older versions do.
function guessed(one, turn) {
  const own = one.turns.filter((other) => other.segment === turn.segment);
  const before = own[own.indexOf(turn) - 1];
  const calls = (before?.role === "assistant" ? before.tool_calls : []).filter((call) => !call.error);
  return calls.length === 1
    ? [answerCard({ call: calls[0], text: turn.text })]
    : calls.map((call) => card(call, ["", "answered in the text below"], [], written(call)));
}

export function callCards(one, turn) {
  const answers = turn.tool_answers ?? [];
  if (turn.role === "assistant") {
    const after = following(one, turn);
    const known = new Set(
      after.flatMap((other) => [...other.tool_results, ...(other.tool_answers ?? [])]).map(({ call }) => call?.id),
    );
    const untold = after.some(
      (other) => other.role === "tool" && !other.tool_results.length && !other.tool_answers?.length,
    );
    return turn.tool_calls.filter((call) => !known.has(call.id) && (call.error || !untold)).map(openCard);
  }
  if (turn.tool_results.length) return turn.tool_results.map(resultCard);
  if (answers.length) return answers.map(answerCard);
  return turn.role === "tool" ? guessed(one, turn) : [];
}
