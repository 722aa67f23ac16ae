// The bar of filters over the table: what is chosen is what the address says.

import { choice, clip, count, h, put } from "./dom.js";

export const FILTERS = ["text", "kind", "step", "reward", "turns", "stop", "errors", "source", "group", "task"];

// Stop reasons and sources come while a run goes on: `show` puts them, and nothing that is being typed is touched.
export function filterBar(app, change) {
  const now = (name) => app.place.params.get(name) ?? "";
  const field = (name, label, hint, type = "text") =>
    h(
      "label",
      { class: "field " + name },
      label,
      h("input", {
        type,
        name,
        value: now(name),
        placeholder: hint,
        spellcheck: "false",
        autocomplete: "off",
        oninput: (event) => change({ [name]: event.target.value.trim() }),
      }),
    );
  const stops = new Set(now("stop").split(",").filter(Boolean));
  const stopChip = ([stop, n]) =>
    h(
      "button",
      {
        type: "button",
        name: "stop " + stop,
        class: "pill",
        "aria-pressed": String(stops.has(stop)),
        onclick: () => {
          stops.delete(stop) || stops.add(stop);
          change({ stop: [...stops].join(",") }, true);
        },
      },
      stop,
      h("small", null, n.toLocaleString("en-US")),
    );
  const sourceField = (names) =>
    h(
      "label",
      { class: "field" },
      "source",
      h(
        "select",
        { name: "source", onchange: (event) => change({ source: event.target.value }) },
        h("option", { value: "" }, "all"),
        names.map((name) => h("option", { value: name, selected: name === now("source") }, name)),
      ),
    );
  const pills = h("div", { class: "parts" }),
    sources = h("div", { class: "parts" });
  let names = "[]";
  const show = (facets) => {
    keepFocus(pills, () => put(pills, facets.stops.map(stopChip)));
    const found = facets.sources.map(([name]) => name).sort();
    if (JSON.stringify(found) === names) return; // a list that is open would close
    names = JSON.stringify(found);
    keepFocus(sources, () => put(sources, found.length > 1 && sourceField(found)));
  };
  const fixed = ["group", "task"]
    .filter((name) => now(name))
    .map((name) =>
      h(
        "button",
        {
          type: "button",
          class: "pill",
          "aria-pressed": "true",
          title: "remove this filter",
          onclick: () => change({ [name]: "" }, true),
        },
        name + " " + clip(now(name), 60) + " ✕",
      ),
    );
  const element = h(
    "div",
    { class: "filters" },
    h(
      "div",
      { class: "toolbar" },
      field("text", "", 'search words, "a phrase", numbers', "search"),
      choice(
        "kind",
        [
          ["", "all"],
          ["train", "training"],
          ["val", "validation"],
        ],
        now("kind"),
        (kind) => change({ kind }, true),
      ),
      field("step", "step", "10..20"),
      field("reward", "reward", "..0.5"),
      field("turns", "turns", "3.."),
      sources,
      h(
        "button",
        {
          type: "button",
          class: "pill",
          "aria-pressed": String(now("errors") === "1"),
          onclick: () => change({ errors: now("errors") === "1" ? "" : "1" }, true),
        },
        "tool errors",
      ),
    ),
    h(
      "div",
      { class: "toolbar" },
      pills,
      fixed,
      h("span", { class: "grow" }),
      h("output", { class: "soft" }),
      h(
        "button",
        {
          type: "button",
          class: "plain",
          onclick: () => change(Object.fromEntries(FILTERS.map((name) => [name, ""])), true),
        },
        "clear",
      ),
    ),
  );
  return { element, show };
}

// Make the insides of an element anew; what was focused, found by its name, is focused again.
export function keepFocus(element, remake) {
  const focused = element.contains(document.activeElement) ? document.activeElement.name : null;
  remake();
  if (focused) element.querySelector(`[name="${CSS.escape(focused)}"]`)?.focus();
}

export function told(total, all) {
  return total === all ? count(total, "episode") : `${total.toLocaleString("en-US")} of ${count(all, "episode")}`;
}
