// How often each task is passed over the steps: which are learned, forgotten, or never solved.

import { get, NO_EPISODES } from "./api.js";
import { choice, clip, count, h, hideTip, number, oneLine, put, showTip, svg } from "./dom.js";
import { extent } from "./extent.js";
import { live } from "./live.js";
import { KINDS, kindOf, percent } from "./rewards.js";

const PAGE = 100,
  TYPING = 180,
  WIDE = 240,
  TALL = 22,
  MOST = 80; // columns of a row; more steps than these share columns
const COLUMNS = [
  ["task", "task"],
  ["question", "question"],
  ["last", "last"],
  ["change", "change"],
  ["steps", ""],
];

// A task with its last pass rate, and by how much that differs from its first; null where it was not scored (twice).
function rated(one) {
  const scored = one.cells.filter((cell) => cell[1] > 0);
  const rate = (cell) => (cell ? cell[2] / cell[1] : null);
  const last = rate(scored.at(-1));
  return { ...one, last, change: scored.length > 1 ? last - rate(scored[0]) : null, at: scored.at(-1) };
}

function ordered(tasks, sort, down) {
  const sign = down ? -1 : 1;
  const names = (a, b) => a.task.localeCompare(b.task, "en", { numeric: true });
  if (sort === "task") return tasks.sort((a, b) => sign * names(a, b));
  // Those without a number come last in both orders.
  return tasks.sort(
    (a, b) => (a[sort] === null) - (b[sort] === null) || sign * ((a[sort] ?? 0) - (b[sort] ?? 0)) || names(a, b),
  );
}

// The bars of one task, each at the place of its step in the whole run.
function strip(cells, [first, last], distinct) {
  const wide = Math.min(18, WIDE / Math.min(MOST, distinct.length)),
    spread = distinct.length > MOST;
  const place = spread
    ? (step) => Math.min(MOST - 1, Math.floor(((step - first) / (last - first || 1)) * MOST))
    : (step) => distinct.indexOf(step);
  const columns = Map.groupBy(cells, (cell) => place(cell[0]));
  const bars = [...columns].map(([at, own]) => {
    const [scored, passed, all] = [1, 2, 3].map((n) => own.reduce((sum, cell) => sum + cell[n], 0));
    const share = scored ? passed / scored : null,
      tall = share === null ? 3 : Math.max(2, share * (TALL - 2));
    const style = share === null ? "none" : share === 1 ? "full" : share === 0 ? "zero" : "part";
    const bar = svg("rect", {
      class: "rate " + style,
      x: (at * wide + 0.5).toFixed(1),
      y: (TALL - tall).toFixed(1),
      width: Math.max(1.5, Math.min(14, wide - 1)).toFixed(1),
      height: tall.toFixed(1),
    });
    const steps = extent(own.map((cell) => cell[0]));
    bar.addEventListener("pointermove", (event) =>
      showTip(event, steps[0] === steps[1] ? "step " + steps[0] : `steps ${steps[0]} to ${steps[1]}`, [
        ["passed", share === null ? "none was scored" : `${passed} of ${scored} (${percent(share)})`],
        all > scored && ["not scored", String(all - scored)],
      ]),
    );
    bar.addEventListener("pointerleave", hideTip);
    return bar;
  });
  const words = cells.map((cell) => `step ${cell[0]}: ${cell[1] ? percent(cell[2] / cell[1]) : "not scored"}`);
  const label = cells.length > 20 ? count(cells.length, "step") : words.join(", ");
  return svg("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, class: "rates", role: "img", "aria-label": label }, bars);
}

export function tasksView(root, app) {
  let kind = "train",
    data = null,
    rows = [],
    most = PAGE,
    chosen = null, // the id of a task
    typing = 0;
  const param = (name) => app.place.params.get(name);
  const sort = () => [param("sort") ?? "last", (param("desc") ?? "0") !== "0"];
  const kinds = h("span");
  const said = h("output", { class: "soft" });
  const note = h("p", { class: "note", hidden: true });
  const search = h("input", {
    type: "search",
    value: param("text") ?? "",
    placeholder: "find a task",
    "aria-label": "find a task",
    oninput: () => later(() => draw({ text: search.value.trim() })),
  });
  const passing = h("input", {
    type: "number",
    step: "any",
    value: param("pass") ?? "",
    placeholder: "1",
    "aria-label": "the score with which an episode passes",
    onchange: () => {
      app.adjust({ pass: passing.value });
      view.load();
    },
  });
  const head = h("div", { class: "task th" });
  const body = h("div", { class: "tasklist" });
  const more = h("button", {
    type: "button",
    class: "more",
    hidden: true,
    onclick: () => {
      most += 5 * PAGE;
      draw();
    },
  });
  root.append(
    h(
      "div",
      { class: "toolbar" },
      kinds,
      h("label", { class: "field text" }, search),
      h(
        "label",
        { class: "field", title: "of acc where the reward function reports it, else of the reward" },
        "passes from a score of",
        passing,
      ),
      h("span", { class: "grow" }),
      said,
    ),
    note,
    h("div", { class: "card tasks" }, head, body, more),
  );

  function later(act) {
    clearTimeout(typing);
    typing = setTimeout(act, TYPING);
  }

  const link = (one) => app.link("compare", { task: one.task });

  function row(one, range, distinct) {
    const tone = one.change > 0 ? "good" : one.change < 0 ? "bad" : "soft";
    return h(
      "div",
      { class: "task" + (one.task === chosen ? " chosen" : ""), data: { task: one.task } },
      h("a", { href: link(one) }, h("code", null, clip(one.task, 80))),
      h("span", { class: "asked", dir: "auto", title: oneLine(one.question) }, oneLine(one.question)),
      h(
        "span",
        { class: "num" },
        one.last === null ? "–" : percent(one.last),
        one.at && h("small", null, ` ${one.at[2]}/${one.at[1]}`),
      ),
      h(
        "span",
        { class: "num " + tone },
        one.change === null ? "–" : (one.change > 0 ? "+" : "") + number(100 * one.change, 0),
      ),
      strip(one.cells, range, distinct),
    );
  }

  function drawHead(range) {
    const [by, down] = sort();
    const button = ([name, label]) => {
      if (name === "question" || name === "steps")
        return h(
          "span",
          null,
          name === "steps" && Number.isFinite(range[0]) ? `steps ${range[0]} to ${range[1]}` : label,
        );
      return h(
        "button",
        {
          type: "button",
          name,
          class: name === "task" ? null : "num",
          "aria-label": `sort by ${label}`,
          "aria-pressed": String(by === name),
          onclick: () => draw({ sort: name, desc: by === name && !down ? "1" : "0" }),
        },
        label,
        by === name ? (down ? " ↓" : " ↑") : "",
      );
    };
    const focused = head.contains(document.activeElement) ? document.activeElement.name : null;
    put(head, COLUMNS.map(button));
    if (focused) head.querySelector(`[name="${focused}"]`)?.focus();
  }

  function draw(changes) {
    if (changes) {
      app.adjust(changes);
      most = PAGE;
    }
    if (!data) return;
    const wanted = (param("text") ?? "").toLowerCase();
    const matching = data.tasks.filter((one) => (one.task + "\n" + one.question).toLowerCase().includes(wanted));
    rows = ordered(matching.map(rated), ...sort());
    const distinct = [...new Set(data.tasks.flatMap((one) => one.cells.map((cell) => cell[0])))].sort((a, b) => a - b);
    const range = extent(distinct);
    drawHead(range);
    put(
      body,
      rows.slice(0, most).map((one) => row(one, range, distinct)),
      !rows.length && h("p", { class: "empty" }, empty()),
    );
    more.hidden = rows.length <= most;
    put(more, `show more of ${count(rows.length, "task")}; ${number(Math.min(most, rows.length))} are shown`);
    put(
      said,
      rows.length === data.tasks.length
        ? count(rows.length, "task")
        : `${number(rows.length)} of ${count(data.tasks.length, "task")}`,
    );
    const low = data.highest !== null && data.highest < data.threshold;
    note.hidden = !low;
    put(
      note,
      low && `No episode has reached a score of ${number(data.threshold)}; the highest is ${number(data.highest)}.`,
    );
    body.dataset.tasks = rows.length;
  }

  function empty() {
    if (data.tasks.length) return "No task is like that.";
    return kind === "val" ? "No validation is recorded." : NO_EPISODES;
  }

  function choose(by) {
    const at = rows.findIndex((one) => one.task === chosen);
    const next = rows[Math.max(0, Math.min(Math.min(most, rows.length) - 1, at + by))];
    if (!next) return true;
    chosen = next.task;
    for (const element of body.children) element.classList.toggle("chosen", element.dataset.task === chosen);
    body.querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
    return true;
  }

  async function ask() {
    const facets = await get(`runs/${app.run()}/facets`),
      wanted = kindOf(app, facets),
      pass = param("pass");
    return { wanted, found: await get(`runs/${app.run()}/tasks`, { kind: wanted, ...(pass ? { pass } : {}) }) };
  }

  const view = live({
    about: () => String(app.state.runs[app.run()]?.revision),
    ask,
    show: ({ wanted, found }) => {
      kind = wanted;
      data = found;
      put(
        kinds,
        choice("kind", KINDS, kind, (next) => app.go("tasks", { kind: next, pass: param("pass") })),
      );
      draw();
    },
    fail: (problem) => {
      data = null;
      put(body, h("p", { class: "empty" }, problem.message));
    },
  });
  view.load();
  return {
    refresh: view.refresh,
    key: (key) => {
      if (key === "j" || key === "ArrowDown") return choose(1);
      if (key === "k" || key === "ArrowUp") return choose(-1);
      const one = rows.find((row) => row.task === chosen);
      if (key !== "Enter" || !one) return false;
      location.hash = link(one);
      return true;
    },
    close: () => {
      clearTimeout(typing);
      view.close();
    },
  };
}
