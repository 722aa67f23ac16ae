// Reward and any other metric over training steps, all runs in one drawing.

import { metrics } from "./api.js";
import { chart } from "./chart.js";
import { count, h, put } from "./dom.js";
import { extent } from "./extent.js";
import { live } from "./live.js";

const FIRST = [
  /^critic\/rewards\/mean$/,
  /^val-core\/.*\/mean@\d+$/,
  /^tool\/success_rate$/,
  /^num_turns\/mean$/,
  /^response_length\/mean$/,
  /^actor\/entropy$/,
  /^actor\/rollout_mismatch_kl$/,
  /^engine\/idle_share$/,
  /^actor\/grad_norm$/,
  /^timing_s\/step$/,
];

const COLORS = 12; // of the style sheet
const colorOf = (run) => "c" + (run % COLORS);

function chosenAtFirst(names) {
  return FIRST.flatMap((pattern) => names.filter((name) => pattern.test(name))).slice(0, 12);
}

function seriesOf(name, runs, data) {
  const all = data.map((one, n) => ({
    name: runs[n].name,
    color: colorOf(n),
    steps: one.steps,
    values: one.values[name],
  }));
  const some = all.filter((one) => one.values);
  return some
    .map((one) => ({ ...one, points: one.steps.map((s, i) => [s, one.values[i]]).filter((p) => p[1] !== null) }))
    .filter((one) => one.points.length);
}

export function curvesView(root, app) {
  let data = [],
    charts = [];
  const weight = () => Number(app.place.params.get("smooth") ?? 0);
  const list = h("div", { class: "names" });
  const cards = h("div", { class: "cards" });
  const search = h("input", {
    type: "search",
    placeholder: "find a metric",
    "aria-label": "find a metric",
    oninput: drawNames,
  });
  const slider = h("input", {
    type: "range",
    min: 0,
    max: 0.95,
    step: 0.05,
    value: weight(),
    "aria-label": "smoothing",
    oninput: () => {
      app.adjust({ smooth: slider.value });
      drawCards();
    },
  });
  const logarithmic = () => app.place.params.get("log") === "1";
  const axis = h("button", { type: "button", class: "pill", title: "log axis (l)", onclick: switchAxis });
  put(axis, "log axis").ariaPressed = String(logarithmic());
  const legend = h("div", { class: "legend" });
  root.append(
    h("aside", null, h("label", { class: "slider" }, "Smoothing", slider), search, list),
    h("div", { class: "stage" }, h("div", { class: "toolbar" }, axis, legend), cards),
  );

  function switchAxis() {
    app.adjust({ log: logarithmic() ? "" : "1" });
    axis.ariaPressed = String(logarithmic());
    drawCards();
  }

  const names = (of = data) => [...new Set(of.flatMap((one) => one.names))].sort();
  const chosen = (of = data) => {
    const asked = app.place.params.get("m");
    return asked === null ? chosenAtFirst(names(of)) : asked.split("|").filter(Boolean);
  };

  function toggle(name) {
    const now = chosen();
    const next = now.includes(name) ? now.filter((one) => one !== name) : [name, ...now];
    app.adjust({ m: next.join("|") || "|" });
    drawNames();
    view.load();
  }

  function drawNames() {
    const wanted = search.value.toLowerCase(),
      on = new Set(chosen());
    const groups = Map.groupBy(
      names().filter((name) => name.toLowerCase().includes(wanted)),
      (name) => name.split("/")[0],
    );
    const focused = list.contains(document.activeElement) ? document.activeElement.value : null;
    put(
      list,
      ...[...groups].map(([group, members]) =>
        h(
          "details",
          { open: wanted !== "" || members.some((m) => on.has(m)) },
          h("summary", null, group, h("small", null, members.length)),
          members.map((name) =>
            h(
              "label",
              null,
              h("input", { type: "checkbox", value: name, checked: on.has(name), onchange: () => toggle(name) }),
              name.slice(group.length + 1) || name,
            ),
          ),
        ),
      ),
    );
    [...list.querySelectorAll("input")].find((input) => input.value === focused)?.focus();
  }

  function drawCards() {
    const steps = data.flatMap((one) => one.steps);
    const range = extent(steps);
    const options = {
      weight: weight(),
      log: logarithmic(),
      range,
      open: (step) => app.go("timeline", { step }),
      point: (step) => charts.forEach((one) => one.mark(step)),
    };
    const drawn = chosen()
      .map((name) => [name, seriesOf(name, app.state.runs, data)])
      .filter(([, series]) => series.length);
    charts = drawn.map(([name, series]) => chart(name, series, options));
    const nothing = h(
      "p",
      { class: "empty" },
      steps.length ? "Choose metrics at the left." : "No step is finished yet; its metrics will appear here.",
    );
    put(cards, ...(charts.length ? charts.map((one) => one.card) : [nothing]));
    const several = app.state.runs.length > 1;
    put(
      legend,
      ...(several ? app.state.runs.map((run, n) => h("span", { class: colorOf(n) }, h("i"), run.name)) : []),
      h(
        "small",
        null,
        steps.length
          ? count(new Set(steps).size, "step") +
              ", " +
              count(names().length, "metric") +
              "; a click on a curve opens that step"
          : "",
      ),
    );
  }

  const load = (wanted) => Promise.all(app.state.runs.map((_, n) => metrics(n, wanted)));

  function show(fresh) {
    const known = list.childElementCount && names().join();
    data = fresh;
    if (names().join() !== known) drawNames();
    drawCards();
  }

  const view = live({
    about: () => JSON.stringify(app.state.runs.map((run) => [run.metrics, run.step])),
    // The first answer tells the names, of which some are then chosen.
    ask: async () => load(chosen(data.length ? data : await load([]))),
    show,
    fail: (problem) => put(cards, h("p", { class: "empty" }, problem.message)),
  });
  view.load();
  return {
    refresh: view.refresh,
    key: (key) => key === "l" && (switchAxis(), true),
    close: view.close,
  };
}
