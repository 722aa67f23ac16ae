// One episode as a conversation: what was asked, sampled, called and answered, token by token.

import { beside, episode as fetchEpisode } from "./api.js";
import { callCards } from "./calls.js";
import { clip, count, h, number, put, rewardChip, seconds, stopChip } from "./dom.js";
import { FILTERS } from "./filters.js";
import { live } from "./live.js";
import { colourBar, longText, repaint, scaleOf, segmentTokens, settled, tokenBlock } from "./tokens.js";
import { childrenOf, excluded, promptParts, told, treeMap } from "./tree.js";

const ROLES = { assistant: "policy", tool: "tool", user: "user", prompt: "prompt", between: "template" };

function picture(image) {
  const size = `${image.width} × ${image.height} pixels`;
  return h("img", { class: "picture", src: image.source, alt: "an image of " + size, title: size, loading: "lazy" });
}

function credit(turn) {
  if (turn?.reward === null || turn?.reward === undefined) return null;
  const tone = turn.reward > 0 ? "good" : turn.reward < 0 ? "bad" : "";
  return h("span", { class: "chip " + tone }, "reward " + (turn.reward > 0 ? "+" : "") + number(turn.reward));
}

// `turn` is absent for a prompt and for what lies between turns; `more` follows the tokens.
function turnBlock(role, tokens, options, one = null, turn = null, more = null) {
  const facts = turn
    ? [
        turn.seconds ? seconds(turn.seconds) : null,
        turn.finish && turn.finish !== "stop" ? "finish " + turn.finish : null,
        turn.cached_tokens ? number(turn.cached_tokens) + " cached" : null,
      ]
    : [];
  const untold = turn && tokens.length && tokens[0].text === undefined;
  const cards = turn ? callCards(one, turn) : [];
  return h(
    "article",
    { class: "turn " + role, data: turn ? { turn: one.turns.indexOf(turn) } : {} },
    h(
      "header",
      null,
      h("b", null, ROLES[role]),
      h(
        "span",
        { class: "soft" },
        count(tokens.length, "token"),
        facts.filter(Boolean).map((fact) => " · " + fact),
      ),
      credit(turn),
      turn && excluded(one, turn) && h("span", { class: "chip warn" }, "excluded from training"),
    ),
    role === "assistant" ? null : cards,
    tokens.filter((token) => token.image).map(({ image }) => picture(image)),
    untold || (turn && !tokens.length) ? longText(turn.text) : null,
    tokens.length ? tokenBlock(tokens, options.mode, options.scale) : null,
    role === "assistant" ? cards : null,
    more,
  );
}

// Turns own stretches of response tokens; what lies between them is shown as well, so that nothing is hidden.
function segmentBlocks(one, n, options) {
  const segment = one.segments[n],
    { response } = segmentTokens(segment),
    { shared, own } = promptParts(segment, n, options);
  const parts = [shared, own?.length ? turnBlock("prompt", own, options) : null];
  let at = 0;
  for (const turn of one.turns.filter((turn) => turn.segment === n)) {
    if (turn.start > at) parts.push(turnBlock("between", response.slice(at, turn.start), options));
    const tokens = response.slice(Math.max(at, turn.start), turn.end);
    parts.push(turnBlock(turn.role, tokens, options, one, turn, branchNote(one, turn)));
    at = Math.max(at, turn.end);
  }
  if (at < response.length) parts.push(turnBlock("between", response.slice(at), options));
  return parts;
}

// At a turn that several segments continue: which others do.
function branchNote(one, turn) {
  const at = one.segments[turn.segment].prompt_ids.length + turn.end;
  const here = childrenOf(one, turn.segment).filter((n) => {
    const { kind, shared } = one.segments[n].continues;
    return kind === "branch" && shared === at && turn.end > turn.start;
  });
  const links = here.map((n) => h("button", { type: "button", class: "plain", data: { jump: n } }, `segment ${n + 1}`));
  return links.length ? h("p", { class: "branches" }, "↳ continued by ", links) : null;
}

// A segment and, below it, those that continue it. Rewritten histories follow one another; branches are set in.
function segmentTree(one, n, options) {
  const several = one.segments.length > 1,
    { continues } = one.segments[n];
  const title = h(
    "h3",
    null,
    `segment ${n + 1} of ${one.segments.length}`,
    h("span", null, told(one, n) && " · " + told(one, n)),
  );
  return h(
    "section",
    { class: "segment" + (continues && continues.kind !== "rewritten" ? " inner" : ""), data: { segment: n } },
    several && title,
    segmentBlocks(one, n, options),
    childrenOf(one, n).map((child) => segmentTree(one, child, options)),
  );
}

function failedAttempts(one) {
  const lost = Array.isArray(one.extra.failed_attempts) ? one.extra.failed_attempts : [];
  return lost.map(({ error, turns }, n) =>
    h(
      "details",
      { class: "attempt card" },
      h("summary", null, `Attempt ${n + 1} failed: `, clip(error ?? "", 300)),
      (turns ?? []).map(({ role, text }) =>
        h("article", { class: "turn " + role }, h("header", null, h("b", null, ROLES[role] ?? role)), longText(text)),
      ),
      !turns?.length && h("p", { class: "soft" }, "Nothing was sampled in it."),
    ),
  );
}

export function conversation(one, options) {
  const bare = one.segments.length ? [] : one.turns.map((turn) => turnBlock(turn.role, [], options, one, turn));
  const element = h(
    "div",
    { class: "conversation" },
    one.error && h("div", { class: "error" }, longText(one.error)),
    failedAttempts(one),
    childrenOf(one, null).map((root) => segmentTree(one, root, options)),
    bare,
  );
  element.addEventListener("click", ({ target }) => {
    if (target.dataset.jump) jumpTo(element.querySelector(`[data-segment="${target.dataset.jump}"]`));
  });
  return element;
}

// Where the reader looks next, also with the keyboard.
function jumpTo(element) {
  if (!element) return;
  element.tabIndex = -1;
  element.focus({ preventScroll: true });
  element.scrollIntoView({ block: "start" });
}

const isTree = (value) => value !== null && typeof value === "object" && !(value instanceof Node);

function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    Object.entries(pairs).map(([name, value]) => [
      h("dt", null, name),
      h(
        "dd",
        { class: isTree(value) ? "whole" : null },
        value instanceof Node
          ? value
          : typeof value === "number"
            ? number(value, 4)
            : longText(typeof value === "string" ? value : JSON.stringify(value, null, 1), "value"),
      ),
    ]),
  );
}

function side(one) {
  const times = Object.fromEntries(
    Object.entries(one.timings).map(([name, value]) => [
      name,
      name === "started" ? new Date(value * 1000).toLocaleString() : typeof value === "number" ? seconds(value) : value,
    ]),
  );
  const { failed_attempts: _, ...more } = one.extra; // they are in the conversation
  const section = (title, content, open = true) => h("details", { open }, h("summary", null, title), content);
  const system = one.task.prompt.map((message) =>
    h(
      "div",
      null,
      h("small", null, message.role ?? ""),
      longText(
        typeof message.content === "string" ? message.content : JSON.stringify(message.content, null, 1),
        "value",
      ),
    ),
  );
  return h(
    "aside",
    { class: "card" },
    section(
      "Task",
      facts({
        id: one.task.id,
        source: one.task.data_source,
        expected: one.task.ground_truth ?? "–",
        seed: one.seed ?? "–",
      }),
    ),
    section("Reward", facts({ reward: one.reward ?? "not scored", ...one.reward_info })),
    section("Times", facts(times)),
    Object.keys(more).length > 0 && section("More", facts(more)),
    section("Messages", system, false),
    Object.keys(one.task.extra_info).length > 0 && section("Row", facts(one.task.extra_info), false),
  );
}

export function promptBlock(one, options) {
  return one.segments.length ? turnBlock("prompt", segmentTokens(one.segments[0]).prompt, options) : null;
}

export const whichStep = (one) => (one.validate ? "validation" : "training") + " · step " + one.step;

export function heading(one, ...words) {
  return [
    rewardChip(one.reward),
    stopChip(one.stop_reason),
    one.baseline && h("span", { class: "chip" }, "greedy baseline"),
    h("span", { class: "soft" }, words.filter(Boolean).join(" · ")),
  ];
}

export function episodeView(root, app) {
  const id = app.place.params.get("id");
  let one = null,
    bar = null,
    scale = null;

  // The table that this episode was opened from.
  const table = () =>
    Object.fromEntries(
      [...FILTERS, "sort", "desc"].map((name) => [name, app.place.params.get(name)]).filter(([, value]) => value),
    );

  function draw() {
    const tokens = one.segments.reduce((sum, segment) => sum + segment.response_ids.length, 0);
    scale = scaleOf([one]);
    bar = colourBar(app, scale, recolour);
    put(
      root,
      h(
        "div",
        { class: "top" },
        h("a", { href: app.link("episodes", { ...table(), at: id }), class: "back" }, "← episodes"),
        h("h1", null, h("code", null, clip(one.id))),
        heading(one, whichStep(one), `${one.turns.length + 1} turns · ${number(tokens)} response tokens`),
        h("span", { class: "grow" }),
        h("a", { href: app.link("group", { group: one.group }) }, "group"),
        h(
          "a",
          { href: app.link("compare", { task: one.task.id, a: app.run() + ":" + one.id }) },
          "same task, other steps",
        ),
        h("a", { href: app.link("timeline", { step: one.step, val: one.validate ? 1 : 0 }) }, "timeline"),
      ),
      bar.element,
      one.note && h("p", { class: "note" }, one.note),
      one.segments.length > 1 && treeMap(one, jump),
      h("div", { class: "columns" }, conversation(one, shownBy()), side(one)),
    );
  }

  // Read when it is used: what is unfolded later has the colours of then.
  const shownBy = () => ({
    get mode() {
      return bar.mode;
    },
    scale,
  });

  // To a turn, or to the segment of this number.
  const jump = (to) =>
    jumpTo(
      root.querySelector(typeof to === "number" ? `[data-segment="${to}"]` : `[data-turn="${one.turns.indexOf(to)}"]`),
    );

  // The segment below the one that is at the top of the window.
  function nextSegment() {
    const all = [...root.querySelectorAll("[data-segment]")];
    const here = all.findLastIndex((element) => element.contains(document.activeElement));
    jumpTo(all[(here + 1) % all.length]);
  }

  function recolour(mode) {
    const fresh = colourBar(app, scale, recolour);
    bar.element.replaceWith(fresh.element);
    bar = fresh;
    repaint(root, mode, scale);
  }

  async function move(side) {
    const query = table(),
      from = location.hash,
      place = await beside(app.run(), { ...query, id });
    if (place[side] && location.hash === from)
      app.go("episode", { ...query, id: place[side], color: app.place.params.get("color") });
  }

  const fail = (problem) => put(root, h("p", { class: "empty" }, problem.message));
  // A link can be opened before its episode is in the index, or even written.
  const view = live({
    about: () => {
      const { revision, metrics, phases } = app.state.runs[app.run()] ?? {};
      return one && settled(one) ? "settled" : JSON.stringify([revision, metrics, phases]);
    },
    ask: () => fetchEpisode(app.run(), id),
    show: (found) => {
      one = found;
      draw();
    },
    fail,
  });
  view.load();
  const keys = {
    j: () => move("after").catch(fail),
    k: () => move("before").catch(fail),
    c: () => bar?.next(),
    s: () => nextSegment(),
    g: () => one && app.go("group", { group: one.group }),
    Escape: () => app.go("episodes", { ...table(), at: id }),
  };
  return {
    refresh: view.refresh,
    key: (key) => {
      keys[key]?.();
      return key in keys;
    },
    close: view.close,
  };
}
