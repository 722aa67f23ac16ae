// The distribution of rewards: a strip with a column for each step, and the bars of one step.

import { get, NO_EPISODES } from "./api.js";
import { choice, count, h, hideTip, number, put, showTip } from "./dom.js";
import { live } from "./live.js";

const LEFT = 74,
  RIGHT = 8,
  AXIS = 20;
export const KINDS = [
  ["train", "training"],
  ["val", "validation"],
];

const sum = (values) => values.reduce((a, b) => a + b, 0);
export const percent = (share) => (share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0) + " %";

// The kind that the address names, else the first that has episodes.
export function kindOf(app, facets) {
  const asked = app.place.params.get("kind");
  if (KINDS.some(([kind]) => kind === asked)) return asked;
  return facets.steps.some((row) => !row[1]) || !facets.steps.length ? "train" : "val";
}

function binName([low, high]) {
  const short = (value) => String(Number(value.toPrecision(6)));
  return low === high ? short(low) : `${short(low)} to ${short(high)}`;
}

// Steps that fall on the same pixels are one column.
function columns(steps, width) {
  const size = Math.max(1, Math.ceil(steps.length / Math.max(1, width)));
  return Array.from({ length: Math.ceil(steps.length / size) }, (_, n) => {
    const part = steps.slice(n * size, (n + 1) * size);
    return {
      first: part[0][0],
      last: part.at(-1)[0],
      unscored: sum(part.map((step) => step[1])),
      counts: part[0][2].map((_, bin) => sum(part.map((step) => step[2][bin]))),
    };
  });
}

export function rewardsView(root, app) {
  let kind = "train",
    data = { bins: [], steps: [] },
    shown = [];
  const head = h("div", { class: "toolbar" });
  const words = h("p", { class: "said" });
  const canvas = h("canvas", { role: "img", "aria-label": "how the rewards are distributed, by step" });
  const strip = h("div", { class: "card strip", hidden: true }, canvas);
  const bars = h("div", { class: "card bars", hidden: true });
  root.append(head, words, strip, bars);

  const step = () => {
    const asked = app.place.params.get("step");
    const found = asked === null ? null : data.steps.find((one) => one[0] === Number(asked));
    return found ?? data.steps.at(-1);
  };

  function pick(next) {
    app.adjust({ step: next });
    drawHead();
    draw();
  }

  function move(by) {
    const at = data.steps.indexOf(step()) + by;
    if (data.steps[at]) pick(data.steps[at][0]);
  }

  function drawHead() {
    const now = step();
    const focused = head.contains(document.activeElement) ? document.activeElement.ariaLabel : null;
    put(
      head,
      choice("kind", KINDS, kind, (next) => app.go("rewards", { kind: next })),
      now && [
        h("button", { type: "button", onclick: () => move(-1), "aria-label": "step before" }, "‹"),
        h("b", null, "Step " + number(now[0])),
        h("button", { type: "button", onclick: () => move(1), "aria-label": "step after" }, "›"),
      ],
      h("span", { class: "grow" }),
      now && h("a", { href: app.link("episodes", { step: now[0], kind }) }, "its episodes"),
      now && h("a", { href: app.link("timeline", { step: now[0], val: kind === "val" ? 1 : 0 }) }, "timeline"),
    );
    if (focused) head.querySelector(`[aria-label="${focused}"]`)?.focus();
  }

  function geometry() {
    const width = Math.max(260, strip.clientWidth - 24),
      row = Math.max(9, Math.min(34, Math.floor(240 / Math.max(1, data.bins.length)))),
      space = width - LEFT - RIGHT;
    shown = columns(data.steps, Math.floor(space / 2));
    const wide = Math.min(26, space / shown.length);
    return { width, row, wide, height: row * data.bins.length + AXIS };
  }

  function draw() {
    strip.hidden = bars.hidden = !data.steps.length;
    if (!data.steps.length) return;
    const g = geometry(),
      scale = devicePixelRatio || 1,
      pen = canvas.getContext("2d");
    canvas.width = g.width * scale;
    canvas.height = g.height * scale;
    canvas.style.width = g.width + "px";
    canvas.style.height = g.height + "px";
    const css = getComputedStyle(canvas);
    const color = (name) => {
      canvas.style.color = `var(--${name})`;
      return css.color;
    };
    pen.scale(scale, scale);
    pen.font = "11px " + css.getPropertyValue("--sans");
    pen.textBaseline = "middle";
    drawCells(pen, g, color);
    drawAxes(pen, g, color);
    drawBars();
  }

  function drawCells(pen, g, color) {
    const accent = color("accent"),
      raised = color("raised"),
      chosen = step()[0],
      share = (counts, one) => one / (sum(counts) || 1),
      best = shown.reduce((most, { counts }) => counts.reduce((a, one) => Math.max(a, share(counts, one)), most), 0);
    shown.forEach(({ first, last, counts }, n) => {
      const x = LEFT + n * g.wide;
      counts.forEach((one, bin) => {
        const y = (data.bins.length - 1 - bin) * g.row;
        pen.fillStyle = one ? accent : raised;
        pen.globalAlpha = one ? 0.1 + (0.9 * share(counts, one)) / best : 0.5;
        pen.fillRect(x, y, g.wide - (g.wide > 4 ? 1 : 0), g.row - 1);
      });
      pen.globalAlpha = 1;
      if (chosen < first || chosen > last) return;
      pen.strokeStyle = color("ink");
      pen.lineWidth = 1.5;
      pen.strokeRect(x - 0.5, 0.75, Math.max(3, g.wide), g.row * data.bins.length - 1.5);
    });
  }

  function drawAxes(pen, g, color) {
    pen.fillStyle = color("soft");
    pen.textAlign = "right";
    const every = Math.ceil(14 / g.row);
    data.bins.forEach((bin, n) => {
      if (n % every === 0)
        pen.fillText(binName(bin), LEFT - 6, (data.bins.length - 1 - n) * g.row + g.row / 2, LEFT - 8);
    });
    pen.textAlign = "left";
    const gap = Math.max(1, Math.ceil(46 / g.wide));
    shown.forEach(({ first }, n) => {
      if (n % gap === 0) pen.fillText(first, LEFT + n * g.wide, g.height - AXIS / 2 + 2);
    });
  }

  function drawBars() {
    const [at, unscored, counts] = step(),
      most = Math.max(1, unscored, ...counts),
      all = sum(counts);
    const row = (name, one, link, style) => {
      const bar = h("i", { class: style });
      bar.style.width = (100 * one) / most + "%";
      const cells = [
        h("span", { class: "of" }, name),
        h("span", { class: "room" }, bar),
        h("span", { class: "n" }, count(one, "episode") + (style ? "" : " · " + percent(all ? one / all : 0))),
      ];
      return link ? h("a", { class: "bar", href: link }, cells) : h("div", { class: "bar" }, cells);
    };
    const rows = data.bins.map((bin, n) => {
      const link = app.link("episodes", { step: at, kind, reward: bin[0] === bin[1] ? bin[0] : bin.join("..") });
      return row(binName(bin), counts[n], link, "");
    });
    put(
      bars,
      h("h2", null, `${kind === "val" ? "Validation" : "Training"} step ${at}, `, count(all, "reward")),
      rows.reverse(),
      unscored > 0 && row("not scored", unscored, null, "none"),
    );
  }

  function under(event) {
    const box = canvas.getBoundingClientRect(),
      g = geometry();
    const column = shown[Math.floor((event.clientX - box.left - LEFT) / g.wide)],
      bin = data.bins.length - 1 - Math.floor((event.clientY - box.top) / g.row);
    return event.clientX - box.left >= LEFT && column ? { column, bin } : null;
  }

  canvas.addEventListener("pointermove", (event) => {
    const hit = under(event);
    canvas.style.cursor = hit ? "pointer" : "";
    if (!hit) return hideTip();
    const { first, last, counts, unscored } = hit.column;
    showTip(event, first === last ? "step " + first : `steps ${first} to ${last}`, [
      data.bins[hit.bin] && ["reward " + binName(data.bins[hit.bin]), count(counts[hit.bin], "episode")],
      data.bins[hit.bin] && ["of the scored", percent(sum(counts) ? counts[hit.bin] / sum(counts) : 0)],
      unscored > 0 && ["not scored", String(unscored)],
    ]);
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const hit = under(event);
    if (hit) pick(hit.column.last);
  });
  addEventListener("resize", draw);

  async function ask() {
    const facets = await get(`runs/${app.run()}/facets`),
      wanted = kindOf(app, facets);
    return { wanted, found: await get(`runs/${app.run()}/rewards`, { kind: wanted }) };
  }

  const view = live({
    about: () => String(app.state.runs[app.run()]?.revision),
    ask,
    show: ({ wanted, found }) => {
      kind = wanted;
      data = found;
      canvas.dataset.steps = data.steps.length;
      const none = kind === "val" ? "No validation is recorded." : NO_EPISODES;
      put(
        words,
        data.steps.length ? "A stronger colour is a larger share of a step’s rewards. A click chooses a step." : none,
      );
      drawHead();
      draw();
    },
    fail: (problem) => put(words, problem.message),
  });
  drawHead();
  view.load();
  return {
    refresh: view.refresh,
    restyle: draw,
    key: (key) => {
      if (key !== "j" && key !== "k") return false;
      move(key === "j" ? 1 : -1);
      return true;
    },
    close: () => {
      view.close();
      removeEventListener("resize", draw);
    },
  };
}
