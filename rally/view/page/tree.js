// The segments of an episode as a tree: what each continues, and a map of their turns. Shared tokens are shown once.

import { count, h, number, put } from "./dom.js";
import { segmentTokens, tokenBlock } from "./tokens.js";

const WIDE = 40,
  TALL = 26,
  LEFT = 92;
const ROLES = { assistant: "policy", tool: "tool", user: "user" };

const ofSegment = (one, n) => one.turns.filter((turn) => turn.segment === n);
const began = (one, n) => ofSegment(one, n).reduce((first, turn) => Math.min(first, turn.started ?? 0), Infinity);

// The segments that continue segment n, of null those that begin anew, in the order in which they began.
export function childrenOf(one, n) {
  const found = one.segments.flatMap(({ continues }, at) => ((continues?.segment ?? null) === n ? [at] : []));
  return found.sort((a, b) => began(one, a) - began(one, b) || a - b);
}

// The turns as the page of the episode shows them: those of a segment, then of the segments that continue it.
export function turnsInOrder(one) {
  const after = (n) => childrenOf(one, n).flatMap((child) => [...ofSegment(one, child), ...after(child)]);
  return after(null);
}

// A policy turn whose tokens all have mask 0 was excluded by the agent.
export function excluded(one, turn) {
  const mask = one.segments[turn.segment]?.response_mask.slice(turn.start, turn.end) ?? [];
  return turn.role === "assistant" && mask.length > 0 && mask.every((bit) => bit === 0);
}

// How many turns of its segment end at or before this many tokens of the whole history.
function turnsBefore(one, n, tokens) {
  const prompt = one.segments[n].prompt_ids.length;
  return ofSegment(one, n).filter((turn) => prompt + turn.end <= tokens).length;
}

export function told(one, n) {
  const { continues } = one.segments[n];
  if (!continues) return n === childrenOf(one, null)[0] ? "" : "begins anew, with a prompt of its own";
  const which = `segment ${continues.segment + 1}`;
  if (continues.kind === "prompt") return `another answer to the prompt of ${which}`;
  if (continues.kind === "rewritten")
    return `follows ${which} with a history that differs after ${count(continues.shared, "token")}`;
  return `continues ${which} after its turn ${turnsBefore(one, continues.segment, continues.shared)}`;
}

// What a segment begins with: its prompt, less what the segment that it continues has shown already.
export function promptParts(segment, n, options) {
  const { prompt } = segmentTokens(segment),
    { continues } = segment;
  if (!continues) return { shared: null, own: options.hidePrompt && n === 0 ? null : prompt };
  const shared = prompt.slice(0, continues.shared);
  const folded = h("details", { class: "shared" }, h("summary", null, count(shared.length, "shared token")));
  folded.addEventListener("toggle", () => {
    if (folded.open && folded.childElementCount === 1) folded.append(tokenBlock(shared, options.mode, options.scale));
  });
  return { shared: folded, own: continues.kind === "rewritten" ? prompt.slice(continues.shared) : null };
}

// The places of all segments: a row each, children below their parents; the column where its own turns begin.
function places(one) {
  const found = new Map();
  const put = (n, column) => {
    found.set(n, { row: found.size, column });
    for (const child of childrenOf(one, n)) {
      const { kind, shared } = one.segments[child].continues;
      const turns = kind === "rewritten" ? ofSegment(one, n).length : turnsBefore(one, n, shared);
      put(child, column + (kind === "prompt" ? 0 : turns));
    }
  };
  for (const root of childrenOf(one, null)) put(root, 0);
  return found;
}

function turnButton(one, turn, { row, column }, at, jump) {
  const length = turn.end - turn.start,
    left = excluded(one, turn),
    rewarded = turn.reward !== null && turn.reward !== undefined;
  const words = [
    `${ROLES[turn.role]}, ${count(length, "token")}`,
    left && "excluded from training",
    rewarded && "reward " + number(turn.reward),
  ].filter(Boolean);
  const button = h(
    "button",
    {
      type: "button",
      class: `node ${turn.role}${left ? " excluded" : ""}`,
      title: words.join(" · "),
      "aria-label": `segment ${turn.segment + 1}, turn ${at + 1}: ` + words.join(", "),
      onclick: () => jump(turn),
    },
    rewarded ? (turn.reward > 0 ? "+" : "") + Number(turn.reward.toPrecision(2)) : "",
  );
  button.style.left = LEFT + (column + at) * WIDE + "px";
  button.style.top = row * TALL + 4 + "px";
  return button;
}

// From the end of the turn that is continued down to the row of the segment.
function elbow(from, to) {
  const line = h("i", { class: "elbow" });
  const x = LEFT + to.column * WIDE - 5;
  line.style.left = x + "px";
  line.style.top = from.row * TALL + TALL / 2 + "px";
  line.style.height = (to.row - from.row) * TALL + "px";
  return line;
}

// `jump` takes a turn, or the number of a segment.
export function treeMap(one, jump) {
  const placed = places(one);
  const rows = [...placed].flatMap(([n, place]) => {
    const turns = ofSegment(one, n),
      parent = one.segments[n].continues;
    const name = h("button", { type: "button", class: "plain name", onclick: () => jump(n) }, `segment ${n + 1}`);
    name.style.top = place.row * TALL + "px";
    const sampled = one.segments[n].response_mask.reduce((sum, bit) => sum + bit, 0);
    const facts = h(
      "small",
      { class: "facts-of" },
      [count(sampled, "sampled token"), told(one, n)].filter(Boolean).join(" · "),
    );
    facts.style.top = place.row * TALL + 4 + "px";
    facts.style.left = LEFT + (place.column + turns.length) * WIDE + 8 + "px";
    return [
      parent && elbow(placed.get(parent.segment), place),
      name,
      turns.map((turn, at) => turnButton(one, turn, place, at, jump)),
      facts,
    ];
  });
  const widest = Math.max(...[...placed].map(([n, place]) => place.column + ofSegment(one, n).length));
  const box = h("div", { class: "nodes" }, rows);
  box.style.height = placed.size * TALL + "px";
  box.style.minWidth = LEFT + widest * WIDE + 380 + "px";
  const roots = childrenOf(one, null).length,
    branches = one.segments.filter(({ continues }) => continues && continues.kind !== "rewritten").length;
  const summary = [
    count(one.segments.length, "segment"),
    roots > 1 && count(roots, "conversation"),
    branches > 0 && count(branches, "branch", "branches"),
  ];
  return put(
    h("section", { class: "card treemap", "aria-label": "segments of the episode" }),
    h("h2", null, summary.filter(Boolean).join(" · ")),
    h("div", { class: "treescroll" }, box),
  );
}
