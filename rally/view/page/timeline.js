// A step as it ran: its phases, and each episode as a lane. Red in the strip of the engine is a GPU that waits.

import { get, NO_EPISODES } from "./api.js";
import { tickSize } from "./chart.js";
import { choice, clip, count, h, hideTip, number, put, seconds, showTip } from "./dom.js";
import { live } from "./live.js";

const KINDS = {
  queue: "waiting for the engine",
  prefill: "reading the prompt",
  decode: "sampling",
  tool: "in a tool",
  agent: "the agent by itself",
  env: "in the environment",
  user: "simulated user",
  score: "being scored",
};
const WORKING = new Set(["prefill", "decode"]);
const STRIP = 56,
  AXIS = 22,
  GAP = 8,
  LEFT = 92,
  RIGHT = 12,
  TICK = 54; // pixels between two ticks, at least

// How many requests are on the engine at each moment: [[from, to, n], ...], without gaps.
export function load(lanes) {
  const events = lanes.flatMap(([kind, start, end]) =>
    WORKING.has(kind)
      ? [
          [start, 1],
          [end, -1],
        ]
      : [],
  );
  events.sort((a, b) => a[0] - b[0] || b[1] - a[1]);
  const spans = [];
  let running = 0;
  events.forEach(([at, change], n) => {
    running += change;
    const next = events[n + 1]?.[0];
    if (next > at) spans.push([at, next, running]);
  });
  return spans;
}

// `zoom` names a phase: then only the time of that phase is shown.
function prepare(data, validate, zoom) {
  const own = data.episodes.filter((one) => one.validate === validate);
  let shift = 0;
  const rollout = data.phases.find(([phase]) => phase === (validate ? "testing" : "gen"));
  // Records of older runs count from a clock of their own: their lanes begin where their phase does.
  if (own.length && rollout && own[0].started < 1e9) shift = rollout[1] - own[0].started;
  const episodes = own.map((one) => ({
    ...one,
    spans: one.lanes.map(([kind, a, b]) => [kind, a + one.started + shift, b + one.started + shift]),
  }));
  const all = episodes.flatMap((one) => one.spans);
  const near = data.phases.filter(([phase]) => phase === zoom);
  const times = near.length
    ? near.flatMap((p) => [p[1], p[2]])
    : [...data.phases.flatMap((p) => [p[1], p[2]]), ...all.flatMap((s) => [s[1], s[2]])];
  const start = times.reduce((a, b) => Math.min(a, b), Infinity),
    end = times.reduce((a, b) => Math.max(a, b), -Infinity);
  episodes.sort((a, b) => a.started - b.started || a.spans.at(-1)[2] - b.spans.at(-1)[2]);
  return { phases: data.phases, episodes, busy: load(all), start, end };
}

function summary(ready) {
  if (!ready.busy.length) return "";
  const idle = ready.busy.filter(([, , n]) => n === 0).reduce((sum, [a, b]) => sum + b - a, 0);
  const whole = ready.busy.at(-1)[1] - ready.busy[0][0];
  const mean = ready.busy.reduce((sum, [a, b, n]) => sum + (b - a) * n, 0) / whole;
  const share = `${seconds(idle)} of ${seconds(whole)} (${((100 * idle) / whole).toFixed(0)} %)`;
  const spent = Map.groupBy(
    ready.episodes.flatMap((one) => one.spans),
    (span) => span[0],
  );
  const parts = [...spent].map(([kind, spans]) => [kind, spans.reduce((sum, [, a, b]) => sum + b - a, 0)]);
  const total = parts.reduce((sum, [, took]) => sum + took, 0);
  const shares = parts
    .sort((a, b) => b[1] - a[1])
    .map(([kind, took]) => `${kind} ${((100 * took) / total).toFixed(0)} %`)
    .join(", ");
  return `From the first to the last sampled token the engine had nothing to do for ${share}; ${number(mean, 1)} requests were on it at a time. The time of the episodes: ${shares}.`;
}

export function timelineView(root, app) {
  let facets = { steps: [] },
    ready = null,
    headDrawn = "";
  const head = h("div", { class: "toolbar" });
  const words = h("p", { class: "said" });
  const canvas = h("canvas", { role: "img", "aria-label": "phases and episodes of the step over time" });
  const legend = h("div", { class: "legend" });
  root.append(head, words, h("div", { class: "card lanes" }, canvas), legend);

  const steps = (of = facets) => [...new Set(of.steps.map((row) => row[0]))].sort((a, b) => a - b);
  const step = (of = facets) =>
    app.place.params.has("step") ? Number(app.place.params.get("step")) : steps(of).at(-1);
  const kinds = () => facets.steps.filter((row) => row[0] === step()).map((row) => row[1]);
  const validate = () =>
    app.place.params.has("val") ? Number(app.place.params.get("val")) : kinds().includes(0) ? 0 : 1;
  const goto = (changes) => app.go("timeline", { step: step(), ...changes });
  const move = (by) => {
    const now = step(),
      next = by > 0 ? steps().find((one) => one > now) : steps().findLast((one) => one < now);
    if (next !== undefined) goto({ step: next });
  };

  function drawHead() {
    const row = facets.steps.find((one) => one[0] === step() && one[1] === validate());
    const drawn = JSON.stringify([step(), kinds(), validate(), row]);
    if (drawn === headDrawn) return; // somebody may be typing a step
    headDrawn = drawn;
    put(
      head,
      h("button", { type: "button", onclick: () => move(-1), "aria-label": "step before" }, "‹"),
      h(
        "label",
        null,
        "Step ",
        h("input", { type: "number", value: step(), min: 0, onchange: (e) => goto({ step: e.target.value }) }),
      ),
      h("button", { type: "button", onclick: () => move(1), "aria-label": "step after" }, "›"),
      kinds().length > 1 &&
        choice(
          "kind",
          [
            [0, "training"],
            [1, "validation"],
          ],
          validate(),
          (val) => goto({ val }),
        ),
      h("span", { class: "grow" }),
      row && h("span", { class: "soft" }, count(row[2], "episode") + ", mean reward " + number(row[3])),
      row && h("a", { href: app.link("episodes", { step: step(), kind: validate() ? "val" : "train" }) }, "show them"),
    );
  }

  function geometry() {
    const width = Math.max(320, canvas.parentNode.clientWidth - 24),
      n = ready.episodes.length;
    const height = n ? Math.max(2, Math.min(14, Math.floor(620 / n))) : 0;
    const phases = ready.phases.length ? 28 : 0;
    const top = AXIS + phases + (n ? STRIP + GAP : 0);
    const x = (time) => LEFT + ((time - ready.start) / (ready.end - ready.start || 1)) * (width - LEFT - RIGHT);
    return { width, height, phases, top, whole: top + n * height + 8, x };
  }

  function draw() {
    if (!ready || !Number.isFinite(ready.start)) return (canvas.parentNode.hidden = true);
    canvas.parentNode.hidden = false;
    const g = geometry(),
      scale = devicePixelRatio || 1;
    canvas.width = g.width * scale;
    canvas.height = g.whole * scale;
    canvas.style.width = g.width + "px";
    canvas.style.height = g.whole + "px";
    const pen = canvas.getContext("2d"),
      css = getComputedStyle(canvas);
    const color = (name) => {
      canvas.style.color = `var(--${name})`;
      return css.color;
    };
    pen.scale(scale, scale);
    pen.font = "11.5px " + css.getPropertyValue("--sans");
    pen.textBaseline = "middle";
    drawNames(pen, g, color);
    pen.beginPath();
    pen.rect(LEFT, 0, g.width - LEFT, g.whole);
    pen.clip();
    drawAxis(pen, g, color);
    drawPhases(pen, g, color);
    drawStrip(pen, g, color);
    drawLanes(pen, g, color);
  }

  function drawNames(pen, g, color) {
    const middle = AXIS + g.phases + STRIP / 2;
    pen.fillStyle = color("soft");
    if (g.phases) pen.fillText("phases", 4, AXIS + 10);
    if (!ready.episodes.length) return;
    pen.fillText("on the engine", 4, middle - 6);
    pen.fillText("at most " + mostBusy(), 4, middle + 9);
    pen.fillText("episodes", 4, g.top + 8);
  }

  const mostBusy = () => ready.busy.reduce((most, span) => Math.max(most, span[2]), 1);

  function drawAxis(pen, g, color) {
    const span = ready.end - ready.start,
      size = tickSize((4 * span) / Math.min(8, (g.width - LEFT - RIGHT) / TICK));
    for (let at = 0; at <= span; at += size) {
      const x = Math.round(g.x(ready.start + at)) + 0.5;
      pen.strokeStyle = color("rule");
      pen.beginPath();
      pen.moveTo(x, AXIS - 4);
      pen.lineTo(x, g.whole);
      pen.stroke();
      pen.fillStyle = color("soft");
      const name = Number(at.toFixed(6)) + " s";
      if (x + 3 + pen.measureText(name).width <= g.width) pen.fillText(name, x + 3, 9);
    }
  }

  function drawPhases(pen, g, color) {
    ready.phases.forEach(([phase, from, to], n) => {
      const x = g.x(from),
        wide = Math.max(1, g.x(to) - x);
      pen.fillStyle = color(n % 2 ? "phase-b" : "phase-a");
      pen.fillRect(x, AXIS, wide, 20);
      pen.fillStyle = color("ink");
      if (wide > pen.measureText(clip(phase, 40)).width + 8) pen.fillText(clip(phase, 40), x + 5, AXIS + 10.5);
    });
  }

  function drawStrip(pen, g, color) {
    const bottom = AXIS + g.phases + STRIP,
      most = mostBusy();
    for (const [from, to, n] of ready.busy) {
      const x = g.x(from),
        wide = Math.max(0.5, g.x(to) - x),
        tall = (n / most) * (STRIP - 4);
      pen.fillStyle = n ? color("k-decode") : color("idle");
      if (n) pen.fillRect(x, bottom - tall, wide + 0.3, tall);
      else pen.fillRect(x, bottom - STRIP + 4, wide, STRIP - 4);
    }
  }

  function drawLanes(pen, g, color) {
    const colors = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, color("k-" + kind)]));
    ready.episodes.forEach((one, n) => {
      const y = g.top + n * g.height,
        tall = g.height > 4 ? g.height - 1.5 : g.height > 2 ? g.height - 0.6 : g.height;
      for (const [kind, from, to] of one.spans) {
        pen.fillStyle = colors[kind] ?? color("soft");
        pen.fillRect(g.x(from), y, Math.max(0.75, g.x(to) - g.x(from)), tall);
      }
    });
  }

  function hit(event) {
    const box = canvas.getBoundingClientRect(),
      g = geometry();
    const x = event.clientX - box.left,
      y = event.clientY - box.top;
    const time = ready.start + ((x - LEFT) / (g.width - LEFT - RIGHT)) * (ready.end - ready.start);
    const phase = y >= AXIS && y < AXIS + g.phases && ready.phases.find(([, from, to]) => time >= from && time <= to);
    const episode = y >= g.top && ready.episodes[Math.floor((y - g.top) / g.height)];
    const busy =
      !episode && !phase && y >= AXIS + g.phases && ready.busy.find(([from, to]) => time >= from && time < to);
    return { phase, episode, busy };
  }

  function onMove(event) {
    const { phase, episode, busy } = hit(event);
    canvas.style.cursor = (episode && episode.inside !== false) || phase ? "pointer" : "";
    if (phase)
      return showTip(event, clip(phase[0]), [
        ["took", seconds(phase[2] - phase[1])],
        ["a click", "only this phase, or all"],
      ]);
    if (busy)
      return showTip(event, busy[2] ? count(busy[2], "request") + " on the engine" : "engine idle", [
        ["for", seconds(busy[1] - busy[0])],
      ]);
    if (!episode) return hideTip();
    const sums = Map.groupBy(episode.spans, (span) => span[0]);
    showTip(event, clip(episode.id), [
      ["reward", number(episode.reward)],
      ["stop", episode.stop],
      episode.inside === false && ["", "not in this file"],
      ...[...sums].map(([kind, spans]) => [kind, seconds(spans.reduce((sum, [, a, b]) => sum + b - a, 0))]),
    ]);
  }

  canvas.addEventListener("pointermove", onMove);
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const { phase, episode } = hit(event);
    const near = app.place.params.get("phase");
    if (phase) goto({ val: app.place.params.get("val"), phase: near === phase[0] ? "" : phase[0] });
    if (episode && episode.inside !== false) app.go("episode", { id: episode.id });
  });
  addEventListener("resize", draw);

  async function ask() {
    const run = app.run(),
      found = await get(`runs/${run}/facets`),
      chosen = step(found);
    if (chosen === undefined) return { found, data: null };
    const data = await get(`runs/${run}/timeline/${chosen}`).catch((problem) => ({ problem: problem.message }));
    return { found, data };
  }

  function show({ found, data }) {
    facets = found;
    ready = null;
    if (data) drawHead();
    if (!data) put(words, NO_EPISODES);
    else if (data.problem) put(words, data.problem);
    else showStep(data);
    canvas.dataset.episodes = ready?.episodes.length ?? 0;
    draw();
  }

  function showStep(data) {
    ready = prepare(data, validate(), app.place.params.get("phase"));
    const kinds = new Set(ready.episodes.flatMap((one) => one.spans.map((span) => span[0])));
    const known = Object.entries(KINDS).filter(([kind]) => kinds.has(kind));
    put(
      legend,
      known.map(([kind, what]) => h("span", { class: "k-" + kind }, h("i"), kind, h("small", null, " " + what))),
    );
    const absent = ready.episodes.filter((one) => one.inside === false).length;
    put(
      words,
      data.phases.length || ready.episodes.length ? summary(ready) : "This step recorded no times.",
      absent > 0 && ` ${count(absent, "episode is", "episodes are")} drawn here and not in this file.`,
    );
  }

  const view = live({
    about: () => {
      const { revision, phases } = app.state.runs[app.run()] ?? {};
      return JSON.stringify([revision, phases]);
    },
    ask,
    show,
    fail: (problem) => put(words, problem.message),
  });
  view.load();
  return {
    refresh: view.refresh,
    update: () => {
      view.load();
      return true;
    },
    restyle: draw,
    key: (key) => ({ j: () => (move(1), true), k: () => (move(-1), true) })[key]?.() ?? false,
    close: () => {
      view.close();
      removeEventListener("resize", draw);
    },
  };
}
