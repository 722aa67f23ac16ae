// The table of episodes. Only the rows in sight exist; a page is asked for by the key of the row before it.

import { get, rows } from "./api.js";
import { h, number, oneLine, put, rewardChip, seconds, stopChip } from "./dom.js";
import { filterBar, FILTERS, told } from "./filters.js";

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
  let pages = new Map(),
    fresh = new Set(), // pages that were asked for since the table last changed
    keys = new Map(),
    total = 0,
    chosen = 0,
    asked = 0,
    closed = false,
    facets = null;
  const bar = h("div");
  const head = h("div", { class: "tr th", role: "row" });
  const body = h("div", { class: "rows", role: "rowgroup" });
  const nothing = h("p", { class: "empty", hidden: true });
  const drawn = new Map(); // number of a row -> its element, and the row it shows
  const scroll = h("div", { class: "scroll", onscroll: () => requestAnimationFrame(draw) }, head, body, nothing);
  root.append(bar, h("div", { class: "card table", role: "table", "aria-label": "episodes" }, scroll));

  const param = (name) => app.place.params.get(name);
  const query = () =>
    Object.fromEntries([...FILTERS, "sort", "desc"].map((name) => [name, param(name)]).filter(([, v]) => v));
  const sort = () => [param("sort") ?? "step", (param("desc") ?? "1") !== "0"];

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

  function makeRow(n) {
    const row = pages.get(Math.floor(n / PAGE))?.[n % PAGE];
    const cells = COLUMNS.map(([name, , cell]) =>
      h("div", { class: "td " + name, role: "cell" }, row ? cell(row) : "·"),
    );
    const props = { class: "tr", role: "row", href: row ? link(row, n) : null, style: { top: n * ROW + "px" } };
    return { element: h("a", props, cells), row };
  }

  const link = (row, n) => app.link("episode", { id: row.id, ...query(), at: n });

  // Rows that stay in sight stay as they are; only those that came are made.
  function drawRow(n) {
    const row = pages.get(Math.floor(n / PAGE))?.[n % PAGE];
    if (drawn.get(n)?.row !== row || !drawn.has(n)) {
      drawn.get(n)?.element.remove();
      drawn.set(n, makeRow(n));
      body.append(drawn.get(n).element);
    }
    drawn.get(n).element.classList.toggle("chosen", n === chosen);
  }

  function draw() {
    if (closed) return;
    const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - 6);
    const last = Math.min(total, Math.ceil((scroll.scrollTop + scroll.clientHeight) / ROW) + 6);
    body.style.height = total * ROW + "px";
    nothing.hidden = total > 0;
    nothing.textContent = facets?.steps.length ? "No episode is like that." : "No episodes are recorded yet.";
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
    const from = Math.max(0, ...[...keys.keys()].filter((known) => known <= page));
    const answer = await rows(app.run(), {
      ...query(),
      limit: PAGE,
      skip: (page - from) * PAGE,
      ...(keys.has(from) ? { after: keys.get(from) } : {}),
    });
    if (mark !== asked || closed) return;
    pages.set(page, answer.rows);
    if (answer.next) keys.set(page + 1, answer.next);
    draw();
  }

  const ask = () => rows(app.run(), { ...query(), limit: PAGE, count: 1 });

  function say(words, bad) {
    const output = bar.querySelector("output");
    put(output, words).classList.toggle("bad", bad);
  }

  async function load(keep, asking = ask()) {
    const mark = ++asked;
    try {
      const answer = await asking;
      if (mark !== asked || closed) return;
      pages = new Map([...(keep ? pages : []), [0, answer.rows]]); // old rows stay in sight until new ones come
      fresh = new Set([0]);
      keys = new Map(answer.next ? [[1, answer.next]] : []);
      total = answer.count;
      scroll.dataset.total = total;
      if (!keep) {
        chosen = 0;
        scroll.scrollTop = 0;
      }
      say(told(total, app.state.runs[app.run()]?.episodes ?? total), false);
      draw();
    } catch (problem) {
      if (mark === asked && !closed) say(problem.message, true);
    }
  }

  let typing = 0;
  function change(changes, redraw) {
    app.adjust(changes);
    if (redraw) drawBar();
    drawHead();
    clearTimeout(typing);
    typing = setTimeout(() => load(false), redraw ? 0 : TYPING);
  }

  function drawBar() {
    const focused = bar.contains(document.activeElement) ? document.activeElement.name : null;
    put(bar, filterBar(app, facets, change));
    if (focused) bar.querySelector(`[name="${focused}"]`)?.focus();
  }

  function choose(n) {
    chosen = Math.max(0, Math.min(total - 1, n));
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
    const row = pages.get(Math.floor(chosen / PAGE))?.[chosen % PAGE];
    if (name === "Enter" && row) {
      location.hash = link(row, chosen);
      return true;
    }
    return false;
  }

  async function refresh(keep) {
    const asking = ask(),
      mark = asked;
    asking.catch(() => {}); // said by load, which waits for it in a moment
    const found = await get(`runs/${app.run()}/facets`);
    if (closed) return;
    const news = JSON.stringify(found.stops.map((s) => s[0])) !== JSON.stringify(facets?.stops.map((s) => s[0]));
    facets = found;
    if (news || !keep) drawBar();
    if (mark === asked) await load(keep, asking); // else something newer was typed meanwhile
  }

  let revision = app.state.runs[app.run()]?.revision;
  drawHead();
  refresh(false).then(() => {
    if (param("at")) choose(Number(param("at")));
  });
  addEventListener("resize", draw);
  return {
    refresh: () => {
      const now = app.state.runs[app.run()]?.revision;
      if (now !== revision) {
        revision = now;
        refresh(true);
      }
    },
    key,
    close: () => {
      closed = true;
      removeEventListener("resize", draw);
    },
  };
}
