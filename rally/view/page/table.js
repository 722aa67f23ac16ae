// The table of episodes. Only the rows in sight exist; a page is asked for by the key of the row before it.

import { beside, get, NO_EPISODES, recorded, rows } from "./api.js";
import { h, number, oneLine, put, rewardChip, seconds, stopChip } from "./dom.js";
import { filterBar, FILTERS, keepFocus, told } from "./filters.js";
import { live } from "./live.js";

const ROW = 34,
  PAGE = 100,
  TYPING = 180;
const COLUMNS = [
  ["reward", "reward", (row) => rewardChip(row.reward)],
  ["step", "step", (row) => [number(row.step), row.validate ? h("small", { class: "val" }, "val") : null]],
  ["id", "episode", (row) => h("code", null, oneLine(row.id))],
  ["question", "question", (row) => h("span", { dir: "auto" }, oneLine(row.question))],
  ["answer", "last answer", (row) => h("span", { dir: "auto" }, oneLine(row.answer))],
  ["stop", "stop", (row) => stopChip(row.stop)],
  ["turns", "turns", (row) => row.turns],
  ["calls", "calls", (row) => row.calls],
  ["errors", "failed", (row) => (row.errors ? h("b", { class: "bad" }, row.errors) : "0")],
  ["sampled", "sampled", (row) => number(row.sampled)],
  ["seconds", "time", (row) => seconds(row.seconds)],
];

export function tableView(root, app) {
  let known = new Map(), // number of a row -> the row
    fresh = new Set(), // pages that were asked for since the table last changed
    keys = new Map(),
    total = 0,
    chosen = 0,
    picked = false, // whether a person chose it; else it is the first, whichever that is
    asked = 0,
    other = true, // whether the rows that are asked for are of another table than those in sight
    closed = false,
    facets = { stops: [], sources: [] },
    filters = null;
  const bar = h("div");
  const head = h("div", { class: "tr th", role: "row", "aria-rowindex": 1 });
  const body = h("div", { class: "rows", role: "rowgroup" });
  const nothing = h("p", { class: "empty", hidden: true });
  const drawn = new Map(); // number of a row -> its element, and the row it shows
  const scroll = h("div", { class: "scroll", onscroll: () => requestAnimationFrame(draw) }, head, body, nothing);
  const table = h("div", { class: "card table", role: "table", "aria-label": "episodes" }, scroll);
  root.append(bar, table);

  const param = (name) => app.place.params.get(name);
  const query = () =>
    Object.fromEntries([...FILTERS, "sort", "desc"].map((name) => [name, param(name)]).filter(([, v]) => v));
  const sort = () => [param("sort") ?? "step", (param("desc") ?? "1") !== "0"];
  const revision = () => app.state.runs[app.run()]?.revision;

  function drawHead() {
    const [by, down] = sort();
    put(
      head,
      ...COLUMNS.map(([name, label]) =>
        h(
          "button",
          {
            type: "button",
            role: "columnheader",
            class: "td " + name,
            "aria-sort": by === name ? (down ? "descending" : "ascending") : "none",
            onclick: () => change({ sort: name, desc: by === name && down ? "0" : "1" }, true),
          },
          label,
          by === name ? (down ? " ↓" : " ↑") : "",
        ),
      ),
    );
  }

  const link = (row) => app.link("episode", { id: row.id, ...query() });

  function makeRow(n) {
    const row = known.get(n);
    const content = (name, cell) => (name === "id" ? h("a", { href: link(row) }, cell(row)) : cell(row));
    const cells = COLUMNS.map(([name, , cell]) =>
      h("div", { class: "td " + name, role: "cell" }, row ? content(name, cell) : "·"),
    );
    return { element: h("div", { class: "tr", role: "row", "aria-rowindex": n + 2 }, cells), row };
  }

  // Rows that stay in sight stay as they are; only those that came are made, each in its place.
  function drawRow(n) {
    if (!drawn.has(n) || drawn.get(n).row !== known.get(n)) {
      drawn.get(n)?.element.remove();
      drawn.set(n, makeRow(n));
      const next = [...body.children].find((other) => Number(other.ariaRowIndex) > n + 2);
      body.insertBefore(drawn.get(n).element, next ?? null);
      drawn.get(n).element.style.top = n * ROW + "px";
    }
    drawn.get(n).element.classList.toggle("chosen", n === chosen);
  }

  function draw() {
    if (closed) return;
    const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - 6);
    const last = Math.min(total, Math.ceil((scroll.scrollTop + scroll.clientHeight) / ROW) + 6);
    nothing.hidden = total > 0;
    nothing.textContent = recorded(app.run(), app.state.runs[app.run()]) ? "No episode is like that." : NO_EPISODES;
    for (const [n, { element }] of drawn) {
      if (n < first || n >= last) {
        element.remove();
        drawn.delete(n);
      }
    }
    for (let n = first; n < last; n += 1) drawRow(n);
    for (let page = Math.floor(first / PAGE); page * PAGE < last; page += 1) want(page);
  }

  // From the nearest page whose key is known; only a jump of the scroll bar skips rows.
  async function want(page) {
    if (fresh.has(page)) return;
    fresh.add(page);
    const mark = asked;
    const from = [...keys.keys()].reduce((best, key) => (key <= page ? Math.max(best, key) : best), 0);
    const asking = rows(app.run(), {
      ...query(),
      limit: PAGE,
      skip: (page - from) * PAGE,
      ...(keys.has(from) ? { after: keys.get(from) } : {}),
    });
    try {
      const answer = await asking;
      if (mark !== asked || closed) return;
      take(page, answer);
      draw();
    } catch (problem) {
      if (mark !== asked || closed) return;
      fresh.delete(page);
      say(problem.message, true);
    }
  }

  // A row that is as it was stays the same object, so that its element stays too.
  function take(page, answer) {
    answer.rows.forEach((row, i) => {
      const n = page * PAGE + i;
      if (JSON.stringify(known.get(n)) !== JSON.stringify(row)) known.set(n, row);
    });
    if (answer.next) keys.set(page + 1, answer.next);
  }

  function say(words, bad) {
    const output = bar.querySelector("output");
    put(output, words).classList.toggle("bad", bad);
  }

  // The row that stays where it is while others come: the one a person chose, else the first in sight.
  function anchor() {
    if (picked) return chosen;
    return scroll.scrollTop > 0 ? Math.floor(scroll.scrollTop / ROW) : null;
  }

  // Rows have no numbers that stay: where the anchor is now, or the row that somebody came back from, is asked by name.
  async function load() {
    const mark = ++asked,
      from = other ? null : anchor(),
      id = other ? param("at") : known.get(from)?.id;
    try {
      const [answer, place] = await Promise.all([
        rows(app.run(), { ...query(), limit: PAGE, count: 1 }),
        id ? beside(app.run(), { ...query(), id }) : null,
      ]);
      if (mark !== asked || closed) return;
      const at = place?.at ?? null;
      if (other) begin(answer, at);
      else renew(answer, at === null ? 0 : at - from);
      say(told(total, app.state.runs[app.run()]?.episodes ?? total), false);
      draw();
    } catch (problem) {
      if (mark === asked && !closed) say(problem.message, true);
    }
  }

  function begin(answer, at) {
    known = new Map();
    receive(answer);
    other = false;
    chosen = scroll.scrollTop = 0;
    picked = false;
    if (at !== null) choose(at);
  }

  // `shift`: how many rows came before the anchor. Old rows stay in sight until new ones come.
  function renew(answer, shift) {
    known = new Map([...known].map(([n, row]) => [n + shift, row]));
    receive(answer);
    chosen = Math.max(0, Math.min(total - 1, picked ? chosen + shift : 0));
    scroll.scrollTop += shift * ROW;
  }

  function receive(answer) {
    fresh = new Set([0]);
    keys = new Map();
    take(0, answer);
    total = answer.count;
    scroll.dataset.total = total;
    table.ariaRowCount = total + 1;
    body.style.height = total * ROW + "px";
  }

  let typing = 0;
  function change(changes, redraw) {
    app.adjust({ ...changes, at: "" });
    asked += 1; // what is under way is an answer to something else
    other = true;
    if (redraw) drawBar();
    drawHead();
    clearTimeout(typing);
    typing = setTimeout(load, redraw ? 0 : TYPING);
  }

  function drawBar() {
    filters = filterBar(app, change);
    filters.show(facets);
    keepFocus(bar, () => put(bar, filters.element));
  }

  function choose(n) {
    chosen = Math.max(0, Math.min(total - 1, n));
    picked = true;
    const top = chosen * ROW;
    if (top < scroll.scrollTop) scroll.scrollTop = top;
    else if (top + 2 * ROW > scroll.scrollTop + scroll.clientHeight)
      scroll.scrollTop = top + 2 * ROW - scroll.clientHeight;
    draw();
    return true;
  }

  function key(name) {
    const page = Math.floor(scroll.clientHeight / ROW) - 2;
    const moves = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: page, PageUp: -page };
    if (name in moves) return choose(chosen + moves[name]);
    if (name === "Home" || name === "End") return choose(name === "Home" ? 0 : total - 1);
    const row = known.get(chosen);
    if (name === "Enter" && row) {
      location.hash = link(row);
      return true;
    }
    return false;
  }

  const pills = live({
    about: () => String(revision()),
    ask: () => get(`runs/${app.run()}/facets`),
    show: (found) => {
      facets = found;
      filters.show(facets);
    },
    fail: (problem) => say(problem.message, true),
  });

  let seen = revision();
  drawHead();
  drawBar();
  pills.load();
  load();
  addEventListener("resize", draw);
  return {
    refresh: () => {
      pills.refresh();
      if (revision() === seen) return;
      seen = revision();
      load();
    },
    key,
    close: () => {
      closed = true;
      pills.close();
      removeEventListener("resize", draw);
    },
  };
}
