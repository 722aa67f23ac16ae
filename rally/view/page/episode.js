// One episode as a conversation: what was asked, sampled, called and answered, token by token.

import { beside, episode as fetchEpisode } from "./api.js";
import { clip, h, number, put, rewardChip, seconds, stopChip } from "./dom.js";
import { FILTERS } from "./filters.js";
import { live } from "./live.js";
import { colourBar, longText, repaint, scaleOf, segmentTokens, settled, tokenBlock } from "./tokens.js";

const ROLES = { assistant: "policy", tool: "tool", user: "user", prompt: "prompt", between: "template" };

function argumentsText(call) {
  const pairs = Object.entries(call.arguments ?? {});
  return pairs
    .map(([name, value]) => name + ": " + (typeof value === "string" ? value : JSON.stringify(value)))
    .join("\n");
}

function toolCard(result) {
  const { call, status } = result;
  const facts = [
    seconds(result.seconds),
    result.queued > 0.001 ? "waited " + seconds(result.queued) : null,
    result.cached ? "from memory" : null,
    result.truncated ? "answer cut" : null,
    result.reward === null ? null : "reward " + number(result.reward),
  ];
  return h(
    "div",
    { class: "call" },
    h(
      "header",
      null,
      h("code", null, clip(call.name) || "(no name)"),
      h("span", { class: "chip " + (status === "ok" ? "good" : "bad") }, status),
      h("span", { class: "soft" }, facts.filter(Boolean).join(" · ")),
    ),
    h(
      "dl",
      null,
      h("dt", null, "arguments"),
      h("dd", null, longText(call.error ? call.error + "\n" + call.raw : argumentsText(call) || "none", "value")),
      h("dt", null, "result"),
      h("dd", null, longText(result.response.text ?? (result.response.image ? "an image" : ""), "value")),
    ),
  );
}

function picture(image) {
  const size = `${image.width} × ${image.height} pixels`;
  return h("img", { class: "picture", src: image.source, alt: "an image of " + size, title: size, loading: "lazy" });
}

function turnBlock(role, tokens, options, turn) {
  const facts = turn
    ? [
        turn.seconds ? seconds(turn.seconds) : null,
        turn.finish && turn.finish !== "stop" ? "finish " + turn.finish : null,
        turn.cached_tokens ? number(turn.cached_tokens) + " cached" : null,
        turn.reward === null || turn.reward === undefined ? null : "reward " + number(turn.reward),
      ]
    : [];
  const untold = turn && tokens.length && tokens[0].text === undefined;
  return h(
    "article",
    { class: "turn " + role },
    h(
      "header",
      null,
      h("b", null, ROLES[role]),
      h(
        "span",
        { class: "soft" },
        `${number(tokens.length)} tokens`,
        facts.filter(Boolean).map((fact) => " · " + fact),
      ),
    ),
    turn?.tool_results.map(toolCard),
    tokens.filter((token) => token.image).map(({ image }) => picture(image)),
    untold || (turn && !tokens.length) ? longText(turn.text) : null,
    tokens.length ? tokenBlock(tokens, options.mode, options.scale) : null,
  );
}

// Turns own stretches of response tokens; what lies between them is shown as well, so that nothing is hidden.
export function conversation(one, options) {
  const blocks = one.segments.flatMap((segment, n) => {
    const { prompt, response } = segmentTokens(segment);
    const parts = options.hidePrompt && n === 0 ? [] : [turnBlock("prompt", prompt, options)];
    let at = 0;
    for (const turn of one.turns.filter((turn) => turn.segment === n)) {
      if (turn.start > at) parts.push(turnBlock("between", response.slice(at, turn.start), options));
      parts.push(turnBlock(turn.role, response.slice(Math.max(at, turn.start), turn.end), options, turn));
      at = Math.max(at, turn.end);
    }
    if (at < response.length) parts.push(turnBlock("between", response.slice(at), options));
    const title = one.segments.length > 1 ? [h("h3", null, `segment ${n + 1} of ${one.segments.length}`)] : [];
    return [...title, ...parts];
  });
  const bare = one.segments.length ? [] : one.turns.map((turn) => turnBlock(turn.role, [], options, turn));
  return h(
    "div",
    { class: "conversation" },
    one.error && h("div", { class: "error" }, longText(one.error)),
    blocks,
    bare,
  );
}

function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    Object.entries(pairs).map(([name, value]) => [
      h("dt", null, name),
      h(
        "dd",
        null,
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
    Object.keys(one.extra).length > 0 && section("More", facts(one.extra)),
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
      h("div", { class: "columns" }, conversation(one, { mode: bar.mode, scale }), side(one)),
    );
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
