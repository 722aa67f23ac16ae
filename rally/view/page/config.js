// The resolved configuration of the runs that are open, searched by words; of several runs, what differs.

import { exported, get } from "./api.js";
import { count, h, number, put } from "./dom.js";
import { live } from "./live.js";
import { longText } from "./tokens.js";

const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));

// [key, [value of each run as text, undefined where it has none], whether they differ], in the order of the first run.
export function compared(configs) {
  const maps = configs.map(({ keys }) => new Map(keys));
  const names = [...new Set(maps.flatMap((map) => [...map.keys()]))];
  return names.map((name) => {
    const values = maps.map((map) => (map.has(name) ? text(map.get(name)) : undefined));
    return [name, values, values.some((value) => value !== values[0])];
  });
}

export function configView(root, app) {
  let rows = [],
    several = false;
  const param = (name) => app.place.params.get(name);
  const onlyDifferent = () => several && (param("all") ?? "0") === "0";
  const said = h("output", { class: "soft" });
  const note = h("p", { class: "note", hidden: true });
  const table = h("div", { class: "card config" });
  const search = h("input", {
    type: "search",
    value: param("text") ?? "",
    placeholder: "find keys and values",
    "aria-label": "find keys and values",
    oninput: () => {
      app.adjust({ text: search.value.trim() });
      draw();
    },
  });
  const toggle = h("button", {
    type: "button",
    class: "pill",
    hidden: true,
    onclick: () => {
      app.adjust({ all: onlyDifferent() ? "1" : "" });
      draw();
    },
  });
  put(toggle, "only what differs");
  root.append(
    h(
      "div",
      { class: "toolbar" },
      h("label", { class: "field text" }, search),
      toggle,
      h("span", { class: "grow" }),
      said,
    ),
    note,
    table,
  );

  function draw() {
    const words = (param("text") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter(([name, values]) => {
      const all = [name, ...values].join("\n").toLowerCase();
      return words.every((word) => all.includes(word));
    });
    const shown = onlyDifferent() ? found.filter(([, , differs]) => differs) : found;
    const different = rows.filter(([, , differs]) => differs).length;
    toggle.hidden = !several;
    toggle.ariaPressed = String(onlyDifferent());
    put(
      said,
      `${number(shown.length)} of ${count(rows.length, "key")}`,
      several && (different ? `, ${number(different)} differ` : ", none differs"),
    );
    table.style.setProperty("--runs", app.state.runs.length);
    const header = [h("span", null, "key"), app.state.runs.map((run) => h("b", { title: run.name }, run.name))];
    const cell = (value) => (value === undefined ? h("i", { class: "soft" }, "not there") : longText(value, "value"));
    const why = !rows.length
      ? ""
      : onlyDifferent() && !different
        ? "All keys have the same values."
        : "No key is like that.";
    put(
      table,
      h("div", { class: "keys th" }, header),
      shown.map(([name, values, differs]) =>
        h(
          "div",
          { class: "keys" + (differs ? " differs" : "") + (onlyDifferent() ? " alone" : "") },
          h(
            "code",
            null,
            name.split(/(?<=[._])/).map((part) => [part, h("wbr")]),
          ),
          values.map((value) => h("div", null, cell(value))),
        ),
      ),
      !shown.length && h("p", { class: "empty" }, why),
    );
    table.dataset.keys = shown.length;
  }

  const view = live({
    about: () => JSON.stringify(app.state.runs.map((run) => run.config)),
    ask: () => Promise.all(app.state.runs.map((_, n) => get(`runs/${n}/config`))),
    show: (found) => {
      several = found.length > 1;
      rows = compared(found);
      const notes = found.map((one) => one.note).filter(Boolean);
      if (exported) notes.push("Of paths, an exported file has the last part.");
      note.hidden = !notes.length;
      put(note, notes.join(" "));
      draw();
    },
    fail: (problem) => put(table, h("p", { class: "empty" }, problem.message)),
  });
  view.load();
  return { refresh: view.refresh, close: view.close };
}
