// The same task at two steps, or in two runs: turn beside turn, with what changed marked.

import { episode, exported, get, NO_EPISODES, rows } from "./api.js";
import { diff } from "./diff.js";
import { told } from "./filters.js";
import { clip, h, number, put, rewardChip, stopChip } from "./dom.js";
import { extent } from "./extent.js";
import { live } from "./live.js";
import { turnsInOrder } from "./tree.js";

const MOST = 500; // episodes of a task
const CUT = 20000; // characters of a turn that are compared

function turnsOf(one) {
  return turnsInOrder(one).map((turn) => ({
    role: turn.role,
    text: turn.text || turn.tool_results.map((r) => r.response.text ?? "").join("\n"),
  }));
}

function pair(left, right) {
  const parts = diff((left?.text ?? "").slice(0, CUT), (right?.text ?? "").slice(0, CUT));
  const cut = (turn) =>
    turn?.text.length > CUT &&
    h(
      "small",
      null,
      `${(turn.text.length - CUT).toLocaleString("en-US")} more characters are not compared; the episode shows them.`,
    );
  const cell = (turn, kind) =>
    h(
      "div",
      { class: "cell " + (turn?.role ?? "none") },
      turn && h("small", null, turn.role === "assistant" ? "policy" : turn.role),
      turn &&
        h(
          "pre",
          { class: "text", dir: "auto" },
          parts
            .filter(([what]) => what === "same" || what === kind)
            .map(([what, text]) => (what === "same" ? text : h("mark", { class: what }, text))),
        ),
      cut(turn),
    );
  return [cell(left, "gone"), cell(right, "new")];
}

function label(option) {
  const when = `${option.runName}step ${option.step}${option.validate ? " val" : ""}`;
  return `${when} · reward ${number(option.reward)} · ${clip(option.id, 60)}`;
}

const pass = (option) => (option.validate ? "validation" : "training") + (option.id.includes("-greedy") ? ", greedy" : "");

export function compareView(root, app) {
  const param = (name) => app.place.params.get(name);
  let some = null;

  const option = (n, row) => ({
    ...row,
    run: n,
    key: n + ":" + row.id,
    runName: app.state.runs.length > 1 ? app.state.runs[n].name + " · " : "",
  });

  // Of all runs the newest episodes of the task, in order of steps; and those that the address names, however old.
  async function candidates(task) {
    const answers = await Promise.all(app.state.runs.map((_, n) => rows(n, { task, limit: MOST, count: 1 })));
    const newest = answers.flatMap((answer, n) => answer.rows.toReversed().map((row) => option(n, row)));
    const missing = ["a", "b"].map(param).filter((key) => key && !newest.some((one) => one.key === key));
    const named = await Promise.all([...new Set(missing)].map((key) => byKey(task, key)));
    return { options: [...named.flat(), ...newest], recorded: answers.reduce((sum, one) => sum + one.count, 0) };
  }

  async function byKey(task, key) {
    const at = key.indexOf(":"),
      n = Number(key.slice(0, at));
    if (!(n in app.state.runs)) return [];
    return (await rows(n, { task, id: key.slice(at + 1), limit: 1 })).rows.map((row) => option(n, row));
  }

  // A task that came out differently at the first and the last validation, if there is one.
  async function someTask() {
    const run = app.run(),
      { steps } = await get(`runs/${run}/facets`);
    const tested = steps.filter((row) => row[1]).map((row) => row[0]);
    const [first, last] = await Promise.all(
      extent(tested).map((step) =>
        tested.length
          ? rows(run, { kind: "val", step: String(step), sort: "id", desc: "0", limit: MOST })
          : { rows: [] },
      ),
    );
    const before = new Map(first.rows.map((row) => [row.task, row.reward]));
    const changed = last.rows.find((row) => before.has(row.task) && before.get(row.task) < row.reward);
    return (changed ?? last.rows[0] ?? (await rows(run, { limit: 1 })).rows[0])?.task;
  }

  function picker(name, options, chosen) {
    return h(
      "select",
      {
        "aria-label": name === "a" ? "left episode" : "right episode",
        onchange: (e) =>
          app.go("compare", {
            task: param("task") ?? options[0].task,
            a: param("a"),
            b: param("b"),
            [name]: e.target.value,
          }),
      },
      options.map((option) => h("option", { value: option.key, selected: option.key === chosen.key }, label(option))),
    );
  }

  async function ask() {
    const task = param("task") ?? (some ??= await someTask());
    const { options, recorded } = task ? await candidates(task) : { options: [] };
    if (!options.length) return { options, task };
    const find = (key) => options.find((option) => option.key === key);
    // From an episode one looks at where its run came to; if this is it, at where it began.
    const left = find(param("a")) ?? options[0];
    const all = options.filter((option) => option.run === left.run);
    const same = all.filter((option) => pass(option) === pass(left));
    const own = same.length > 1 ? same : all; // a sampled episode beside a greedy one would differ by that already
    const right = find(param("b")) ?? (left === own.at(-1) ? own[0] : own.at(-1));
    const [a, b] = await Promise.all([left, right].map((one) => episode(one.run, one.id)));
    return { task, options, recorded, left, right, a, b };
  }

  function draw({ task, options, recorded, left, right, a, b }) {
    if (!options.length) {
      const none = task ? `No episode of ${clip(task, 80)} is ${exported ? "in this file" : "recorded"}.` : NO_EPISODES;
      return put(root, h("p", { class: "empty" }, none));
    }
    const [ta, tb] = [turnsOf(a), turnsOf(b)];
    const cells = Array.from({ length: Math.max(ta.length, tb.length) }, (_, n) => pair(ta[n], tb[n])).flat();
    const top = (name, option, one) =>
      h(
        "header",
        null,
        picker(name, options, option),
        h(
          "div",
          null,
          rewardChip(one.reward),
          stopChip(one.stop_reason),
          h("a", { href: app.link("episode", { run: option.run, id: one.id }) }, "open"),
        ),
      );
    put(
      root,
      h(
        "div",
        { class: "top" },
        h("h1", null, h("code", null, clip(task))),
        h("span", { class: "soft" }, told(options.length, recorded) + " of this task"),
        h("span", { class: "grow" }),
        h("a", { href: app.link("episodes", { task }) }, "list them"),
      ),
      h(
        "p",
        { class: "asked card", dir: "auto" },
        left.question,
        a.task.ground_truth !== null &&
          h(
            "span",
            { class: "soft" },
            "  expected: ",
            clip(typeof a.task.ground_truth === "string" ? a.task.ground_truth : JSON.stringify(a.task.ground_truth)),
          ),
      ),
      h("div", { class: "diff card" }, top("a", left, a), top("b", right, b), cells),
      options.length === 1 &&
        h(
          "p",
          { class: "note" },
          "Only one episode of this task is recorded, so there is nothing to compare it with yet.",
        ),
    );
  }

  const view = live({
    about: () => JSON.stringify(app.state.runs.map((run) => run.revision)),
    ask,
    show: draw,
    fail: (problem) => put(root, h("p", { class: "empty" }, problem.message)),
  });
  view.load();
  return {
    refresh: view.refresh,
    update: () => {
      view.load();
      return true;
    },
    close: view.close,
  };
}
