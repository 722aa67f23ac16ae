// The frame: every state is an address after the #, so every state is a link. Views come and go; the bar stays.

import { exported, get } from "./api.js";
import { compareView } from "./compare.js";
import { configView } from "./config.js";
import { curvesView } from "./curves.js";
import { count, h, hideTip, put } from "./dom.js";
import { episodeView } from "./episode.js";
import { groupView } from "./group.js";
import { rewardsView } from "./rewards.js";
import { tableView } from "./table.js";
import { tasksView } from "./tasks.js";
import { timelineView } from "./timeline.js";

const EVERY = 1000; // ms between two looks at a running training
const VIEWS = {
  curves: { name: "Curves", make: curvesView },
  timeline: { name: "Timeline", make: timelineView },
  episodes: { name: "Episodes", make: tableView },
  compare: { name: "Compare", make: compareView },
  rewards: { name: "Rewards", make: rewardsView },
  tasks: { name: "Tasks", make: tasksView },
  config: { name: "Config", make: configView },
  episode: { make: episodeView },
  group: { make: groupView },
};
const TABS = Object.entries(VIEWS).filter(([, view]) => view.name);
const KEYS = [
  ["1 … 7", "the views, from the left"],
  ["j k", "next, previous: row, episode or step"],
  ["Enter", "open the chosen row"],
  ["Esc", "back"],
  ["/", "search"],
  ["c", "colour tokens by the next thing"],
  ["g", "the group of this episode, side by side"],
  ["s", "the next segment of this episode"],
  ["l", "curves with a log axis"],
  ["d", "dark or light"],
  ["?", "this help"],
];

const app = {
  state: { runs: [] },
  place: { view: "curves", params: new URLSearchParams() },
  run: () => Math.min(Number(app.place.params.get("run") ?? 0) || 0, Math.max(0, app.state.runs.length - 1)),
  link: (view, params = {}) => "#/" + view + "?" + new URLSearchParams(clean({ run: app.run(), ...params })),
  go: (view, params) => {
    location.hash = app.link(view, params);
  },
  // The same place with something changed, without a step in the history for each letter typed.
  adjust: (changes) => {
    const params = clean({ ...Object.fromEntries(app.place.params), ...changes });
    history.replaceState(null, "", "#/" + app.place.view + "?" + new URLSearchParams(params));
    app.place.params = new URLSearchParams(params);
  },
};
let current = null,
  notesSaid = "[]";

function clean(params) {
  return Object.fromEntries(
    Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined),
  );
}

function parsePlace() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path in VIEWS ? path : "curves", params: new URLSearchParams(query ?? "") };
}

function show() {
  hideTip();
  const last = app.place;
  app.place = parsePlace();
  drawBar();
  if (current?.update && last.view === app.place.view && current.update(last.params)) return;
  current?.close?.();
  const root = document.getElementById("view");
  put(root);
  root.className = app.place.view;
  current = VIEWS[app.place.view].make(root, app) ?? {};
  document.title = (VIEWS[app.place.view].name ?? app.place.params.get("id") ?? "Group") + " · Rally";
}

function drawBar() {
  const tabs = TABS.map(([key, view]) =>
    h("a", { href: app.link(key), "aria-current": key === app.place.view ? "page" : null }, view.name),
  );
  const pick = h(
    "select",
    { "aria-label": "run", onchange: (e) => changeRun(e.target.value) },
    app.state.runs.map((run, n) => h("option", { value: n, selected: n === app.run() }, run.name)),
  );
  put(
    document.getElementById("bar"),
    h("a", { class: "brand", href: app.link("curves") }, "rally"),
    h("nav", { "aria-label": "views" }, tabs),
    h(
      "div",
      { class: "about" },
      h("span", { id: "live" }),
      app.state.runs.length > 1 ? pick : runName(app.state.runs[0]?.name ?? ""),
      h(
        "button",
        { type: "button", title: "dark or light (d)", "aria-label": "dark or light", onclick: switchTheme },
        "◐",
      ),
      h("button", { type: "button", title: "keys (?)", "aria-label": "keys", onclick: toggleHelp }, "?"),
    ),
  );
  drawLive();
}

function runName(name) {
  return h("span", { class: "runname", title: name }, name); // which a narrow window cuts
}

function changeRun(run) {
  const keep = ["curves", "timeline", "episodes", "rewards", "tasks", "config"].includes(app.place.view);
  const params = keep ? Object.fromEntries(app.place.params) : {};
  location.hash = app.link(keep ? app.place.view : "episodes", { ...params, run });
}

function drawLive() {
  const run = app.state.runs[app.run()];
  const live = document.getElementById("live");
  if (!run || !live) return;
  const share = run.bytes ? run.read / run.bytes : 1;
  const parts = [run.step === null ? null : "step " + run.step, count(run.episodes, "episode")];
  if (share < 1) parts.push("indexing " + Math.floor(share * 100) + " %");
  put(
    live,
    share < 1 ? h("progress", { max: 1, value: share, "aria-label": "indexing" }) : null,
    exported ? h("span", { class: "chip" }, "exported") : h("i", { class: "dot", title: "follows the run" }),
    " " + parts.filter(Boolean).join(" · "),
  );
  live.dataset.episodes = run.episodes;
}

function drawNotes() {
  const notes = app.state.runs.flatMap((run) => [
    ...run.problems,
    run.metrics[1] ? `${count(run.metrics[1], "line")} of the metrics of ${run.name} could not be read.` : null,
  ]);
  if (app.state.lost) notes.push("The server does not answer any more; what you see is what it said last.");
  const inside = exported ? exported.notes : [];
  const said = JSON.stringify([inside, notes]);
  if (said === notesSaid) return; // a reader of screens says them again whenever they are made again
  notesSaid = said;
  const paragraphs = (texts, style) => texts.filter(Boolean).map((text) => h("p", { class: style }, text));
  const told = paragraphs(inside, "inside");
  const folded = h("details", { class: "inside" }, h("summary", null, "What is in this file"), told);
  put(document.getElementById("notes"), ...(told.length > 3 ? [folded] : told), ...paragraphs(notes, ""));
}

async function look() {
  try {
    const before = JSON.stringify(app.state.runs);
    const { runs } = await get("state");
    const changed = JSON.stringify(runs) !== before;
    app.state = { runs, lost: false };
    if (changed) current?.refresh?.();
  } catch {
    app.state.lost = true;
  }
  drawLive();
  drawNotes();
}

async function follow() {
  if (!document.hidden) await look();
  setTimeout(follow, EVERY);
}

function switchTheme() {
  const dark =
    (document.documentElement.dataset.theme ??
      (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  setTheme(dark ? "light" : "dark");
  try {
    localStorage.setItem("rally-theme", dark ? "light" : "dark");
  } catch {
    /* a file may not remember */
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  current?.restyle?.();
}

function toggleHelp() {
  const open = document.querySelector("dialog");
  if (open) return open.close();
  const dialog = h(
    "dialog",
    { "aria-label": "keys", onclose: (e) => e.currentTarget.remove(), onclick: (e) => e.currentTarget.close() },
    h("h2", null, "Keys"),
    h(
      "dl",
      null,
      KEYS.map(([keys, what]) => [
        h(
          "dt",
          null,
          keys.split(" ").map((k) => h("kbd", null, k)),
        ),
        h("dd", null, what),
      ]),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog")) return;
  if (event.key === "Enter" && event.target.matches("a, button, summary")) return;
  if (event.target.matches("input:not([type=checkbox], [type=range]), select, textarea")) {
    if (event.key === "Escape" || (event.key === "Enter" && event.target.type === "search")) event.target.blur();
    return;
  }
  const tab = TABS[Number(event.key) - 1];
  const search = document.querySelector("input[type=search]");
  if (current?.key?.(event.key)) event.preventDefault();
  else if (tab) location.hash = app.link(tab[0]);
  else if (event.key === "/" && search) {
    event.preventDefault();
    search.focus();
    search.select();
  } else if (event.key === "?") toggleHelp();
  else if (event.key === "d") switchTheme();
  else if (event.key === "Escape") history.back();
}

async function begin() {
  try {
    const kept = localStorage.getItem("rally-theme");
    if (kept) setTheme(kept);
  } catch {
    /* the system's choice */
  }
  await look();
  show();
  addEventListener("hashchange", show);
  addEventListener("keydown", onKey);
  addEventListener("scroll", hideTip, true);
  drawNotes();
  if (!exported) setTimeout(follow, EVERY);
}

begin();
