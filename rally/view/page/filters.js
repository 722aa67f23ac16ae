// The bar of filters over the table: what is chosen is what the address says.

import { choice, clip, count, h } from "./dom.js";

export const FILTERS = ["text", "kind", "step", "reward", "turns", "stop", "errors", "source", "group", "task"];

export function filterBar(app, facets, change) {
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
  const stopChips = facets.stops.map(([stop, n]) =>
    h(
      "button",
      {
        type: "button",
        class: "pill",
        "aria-pressed": String(stops.has(stop)),
        onclick: () => {
          stops.delete(stop) || stops.add(stop);
          change({ stop: [...stops].join(",") }, true);
        },
      },
      stop,
      h("small", null, n.toLocaleString("en-US")),
    ),
  );
  const sources =
    facets.sources.length > 1 &&
    h(
      "label",
      { class: "field" },
      "source",
      h(
        "select",
        { onchange: (event) => change({ source: event.target.value }) },
        h("option", { value: "" }, "all"),
        facets.sources.map(([name]) => h("option", { value: name, selected: name === now("source") }, name)),
      ),
    );
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
  return h(
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
      stopChips,
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
}

export function told(total, all) {
  return total === all ? count(total, "episode") : `${total.toLocaleString("en-US")} of ${count(all, "episode")}`;
}
