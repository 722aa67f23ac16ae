// Every token is one element that knows what it was: sampled or put there, how likely, how good, under which weights.

import { choice, h, hideTip, number, oneLine, showTip } from "./dom.js";
import { extent } from "./extent.js";

const CUT = 2000; // tokens of a block that are shown before somebody asks for more
const STRONGEST = 55; // % of colour behind a token; with more its text could not be read
const CUT_TEXT = 20000; // characters of a text
export const MODES = [
  ["mask", "mask"],
  ["logprob", "logprob"],
  ["advantage", "advantage"],
  ["version", "weights"],
];

function spread(spans, length) {
  const values = new Array(length).fill(null);
  for (const [value, start, end] of spans ?? []) values.fill(value, start, end);
  return values;
}

// The tokens of a segment, prompt first. `best` is the largest size of an advantage, for the scale of colours.
export function segmentTokens(segment) {
  const length = segment.response_ids.length;
  const advantages = segment.advantages ? spread(segment.advantages, length) : null;
  const versions = spread(segment.spans, length);
  const prompt = segment.prompt_ids.map((id, n) => ({ id, text: segment.prompt_text?.[n], at: n, kind: "prompt" }));
  const response = segment.response_ids.map((id, n) => {
    const sampled = segment.response_mask[n] === 1;
    return {
      id,
      text: segment.response_text?.[n],
      at: prompt.length + n,
      kind: sampled ? "sampled" : "observed",
      logprob: sampled ? segment.response_logprobs[n] : null,
      advantage: sampled && advantages ? advantages[n] : null,
      version: sampled ? versions[n] : null,
    };
  });
  const all = [...prompt, ...response];
  for (const image of segment.images) {
    const [first, ...rest] = all.slice(image.start, image.start + image.rows * image.columns);
    Object.assign(first, { image, text: `[image, ${image.rows} × ${image.columns} tokens]` });
    for (const token of rest) token.text = "";
  }
  return { prompt, response };
}

// The advantage of an episode where all its tokens have the same.
export function sharedAdvantage(one) {
  const values = new Set(one.segments.flatMap((segment) => (segment.advantages ?? []).map(([value]) => value)));
  return values.size === 1 ? [...values][0] : null;
}

export function scaleOf(episodes) {
  const spans = episodes.flatMap((one) => one.segments.flatMap((segment) => segment.advantages ?? []));
  const validation = episodes.every((one) => one.validate); // nothing of which is trained on
  const best = extent([1e-9, ...spans.map(([value]) => Math.abs(value))])[1];
  return { validation, advantages: spans.length > 0, best };
}

// Advantages are written after the episode is; until then there is something to wait for.
export const settled = (one) => one.validate || one.segments.some((segment) => segment.advantages);

function paint(element, token, mode, scale) {
  element.className = "t " + token.kind;
  element.style.removeProperty("--a");
  if (token.kind !== "sampled" || mode === "mask") return;
  if (mode === "version" && token.version !== null) element.className = "t v v" + (((token.version % 6) + 6) % 6);
  const shade = (kind, share) => {
    element.className = "t " + kind;
    element.style.setProperty("--a", Math.round(Math.min(1, share) * STRONGEST) + "%");
  };
  if (mode === "logprob") shade("cold", typeof token.logprob === "number" ? -token.logprob / 3 : 1);
  if (mode === "advantage" && token.advantage !== null)
    shade(token.advantage >= 0 ? "plus" : "minus", Math.abs(token.advantage) / scale.best);
}

function tip(event, token) {
  const lines = [
    ["id", String(token.id)],
    ["position", String(token.at)],
  ];
  if (typeof token.logprob === "number")
    lines.push(["logprob", token.logprob.toFixed(4) + "  (" + (100 * Math.exp(token.logprob)).toPrecision(3) + " %)"]);
  else if (token.logprob !== null && token.logprob !== undefined) lines.push(["logprob", String(token.logprob)]);
  if (token.advantage !== null && token.advantage !== undefined) lines.push(["advantage", number(token.advantage, 4)]);
  if (token.version !== null && token.version !== undefined) lines.push(["weight version", String(token.version)]);
  const text =
    token.text === undefined
      ? "token " + token.id
      : oneLine(JSON.stringify(token.text).slice(1, -1)) || "(part of the next character)";
  showTip(event, text, [["", token.kind], ...lines]);
}

const known = new WeakMap(); // element -> token

export function tokenBlock(tokens, mode, scale) {
  const block = h("div", { class: "tokens", dir: "auto" });
  const add = (from, to) => {
    for (const token of tokens.slice(from, to)) {
      const element = h("span", null, token.text === undefined ? token.id + " " : token.text);
      if (/^<[|｜].*[|｜]>$/.test(token.text ?? "")) element.dataset.special = "";
      if (/^\s*\n\s*$/.test(token.text ?? "")) element.dataset.newline = ""; // else nothing could be pointed at
      known.set(element, token);
      paint(element, token, mode, scale);
      block.append(element);
    }
    if (to < tokens.length)
      block.append(
        more(tokens.length - to, "token", (button) => {
          button.remove();
          add(to, tokens.length);
        }),
      );
  };
  add(0, CUT);
  block.addEventListener("pointerover", (event) => {
    const token = known.get(event.target);
    if (token) tip(event, token);
  });
  block.addEventListener("pointerout", hideTip);
  return block;
}

export function repaint(root, mode, scale) {
  for (const element of root.querySelectorAll(".tokens .t")) paint(element, known.get(element), mode, scale);
}

function more(left, what, act) {
  const button = h(
    "button",
    { type: "button", class: "more", onclick: () => act(button) },
    `show ${left.toLocaleString("en-US")} more ${what}s`,
  );
  return button;
}

// A text as it is; a very long one is cut, with a button that says how much is left.
export function longText(text, className = "text") {
  const whole = text ?? "";
  const block = h("pre", { class: className, dir: "auto" }, whole.slice(0, CUT_TEXT));
  if (whole.length > CUT_TEXT) {
    block.append(
      more(whole.length - CUT_TEXT, "character", (button) => {
        button.remove();
        block.append(h("span", null, whole.slice(CUT_TEXT)));
      }),
    );
  }
  return block;
}

export function colourBar(app, scale, changed) {
  const modes = MODES.filter(([mode]) => mode !== "advantage" || scale.advantages);
  const asked = app.place.params.get("color");
  const mode = modes.some(([name]) => name === asked) ? asked : "mask";
  const pick = (next) => {
    app.adjust({ color: next });
    changed(next);
  };
  const keys = {
    mask: [
      ["t sampled", scale.validation ? "sampled" : "sampled: trained on"],
      ["t observed", "put there by a tool, a user or the template"],
    ],
    logprob: [
      ["t cold a3", "likely"],
      ["t cold a27", "p = 0.22"],
      ["t cold a55", "p ≤ 0.05"],
    ],
    advantage: [
      ["t minus a55", number(-scale.best)],
      ["t plus a55", "+" + number(scale.best)],
    ],
    version: [["t v v0", "one colour for each weight version"]],
  };
  const element = h(
    "div",
    { class: "toolbar colours" },
    h("span", { class: "soft" }, "colour tokens by"),
    choice("colour tokens by", modes, mode, pick),
    keys[mode].map(([name, what]) => h("span", { class: "key" }, h("span", { class: name }, what))),
  );
  const next = () => pick(modes[(modes.findIndex(([name]) => name === mode) + 1) % modes.length][0]);
  return { element, mode, next };
}
