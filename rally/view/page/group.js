// A group side by side: what was sampled for one prompt in one step, best reward first.

import { episode, rows } from "./api.js";
import { clip, count, h, number, put } from "./dom.js";
import { conversation, heading, promptBlock, whichStep } from "./episode.js";
import { live } from "./live.js";
import { colourBar, repaint, scaleOf, settled, sharedAdvantage } from "./tokens.js";

const MOST = 64;

function spread(rewards) {
  const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  const variance = rewards.reduce((sum, value) => sum + (value - mean) ** 2, 0) / rewards.length;
  const flat = variance === 0 && rewards.length > 1 ? "; all are equal, so this group teaches nothing by itself" : "";
  return `mean reward ${number(mean)}, deviation ${number(Math.sqrt(variance))}${flat}`;
}

export function groupView(root, app) {
  const group = app.place.params.get("group");
  let kept = null,
    bar = null,
    scale = null;

  function column(one, options) {
    const advantage = sharedAdvantage(one);
    return h(
      "section",
      { class: "card" },
      h(
        "header",
        null,
        h("a", { href: app.link("episode", { id: one.id }) }, h("code", null, clip(one.id, 60))),
        heading(one, advantage === null ? null : "advantage " + number(advantage)),
      ),
      conversation(one, options),
    );
  }

  // Whole episodes are much to ask for: only when a row is another one, or advantages may have come.
  async function ask() {
    const answer = await rows(app.run(), { group, sort: "reward", desc: "1", limit: MOST, count: 1 });
    const same = kept?.all.every(settled) && JSON.stringify(kept.answer) === JSON.stringify(answer);
    if (!same) kept = { answer, all: await Promise.all(answer.rows.map((row) => episode(app.run(), row.id))) };
    return kept;
  }

  function draw({ answer, all }) {
    if (!all.length) return put(root, h("p", { class: "empty" }, "There is no such group in this run."));
    scale = scaleOf(all);
    bar = colourBar(app, scale, recolour);
    const rewards = all
      .filter((one) => !one.baseline)
      .map((one) => one.reward)
      .filter((reward) => typeof reward === "number");
    // Agents that write their prompts themselves need not all begin with the same one.
    const held = all.filter((one) => one.segments.length);
    const shared = new Set(held.map((one) => one.segments[0].prompt_ids.join())).size === 1;
    const left = answer.count > all.length ? `, the ${MOST} best of ${answer.count} are shown` : "";
    put(
      root,
      h(
        "div",
        { class: "top" },
        h("a", { class: "back", href: app.link("episodes", { group }) }, "← episodes"),
        h("h1", null, h("code", null, clip(group))),
        h(
          "span",
          { class: "soft" },
          whichStep(all[0]) +
            " · " +
            count(all.length, "episode") +
            left +
            (rewards.length ? " · " + spread(rewards) : ""),
        ),
        h("span", { class: "grow" }),
        h("a", { href: app.link("compare", { task: all[0].task.id }) }, "same task, other steps"),
      ),
      bar.element,
      all[0].note && h("p", { class: "note" }, all[0].note),
      shared && promptBlock(held[0], { mode: bar.mode, scale }),
      h(
        "div",
        { class: "side" },
        all.map((one) => column(one, { mode: bar.mode, scale, hidePrompt: shared })),
      ),
    );
  }

  function recolour(mode) {
    const fresh = colourBar(app, scale, recolour);
    bar.element.replaceWith(fresh.element);
    bar = fresh;
    repaint(root, mode, scale);
  }

  const view = live({
    about: () => {
      const { revision, metrics, phases } = app.state.runs[app.run()] ?? {};
      return JSON.stringify(kept?.all.every(settled) ? revision : [revision, metrics, phases]);
    },
    ask,
    show: draw,
    fail: (problem) => put(root, h("p", { class: "empty" }, problem.message)),
  });
  view.load();
  return {
    refresh: view.refresh,
    key: (key) => {
      if (key !== "c") return false;
      bar?.next();
      return true;
    },
    close: view.close,
  };
}
