// One metric of several runs as lines over steps: a faint line of what was measured, a strong one of its smoothing.

import { count, h, hideTip, number, put, showTip, svg } from "./dom.js";
import { extent } from "./extent.js";

const WIDTH = 460,
  HEIGHT = 190,
  LEFT = 48,
  RIGHT = 10,
  TOP = 8,
  BOTTOM = 24;
const MOST_POINTS = 600; // more than pixels would only cost time

export function smooth(values, weight) {
  let mean = 0,
    total = 0;
  return values.map(([step, value]) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return [step, mean / total];
  });
}

// Of each stretch of steps the lowest and the highest point, so that no spike is lost.
function thin(points) {
  if (points.length <= MOST_POINTS) return points;
  const size = Math.ceil(points.length / (MOST_POINTS / 2)),
    kept = [];
  for (let at = 0; at < points.length; at += size) {
    const part = points.slice(at, at + size);
    const low = part.reduce((a, b) => (b[1] < a[1] ? b : a)),
      high = part.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

export function tickSize(span) {
  if (!(span > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(span / 4));
  return [1, 2, 5, 10].map((f) => f * power).find((size) => span / 4 <= size * 1.0001);
}

function rounded(low, high) {
  const size = tickSize(high - low);
  return [Math.floor(low / size) * size, Math.ceil(high / size) * size];
}

function bounds(lines) {
  let [low, high] = extent(lines.flatMap((points) => points.map((point) => point[1])));
  if (low >= 0 && high <= 1 && high >= 0.6) return [0, 1]; // a share: small wobbles look small
  if (low === high) {
    low -= Math.abs(low) * 0.1 || 0.5;
    high += Math.abs(high) * 0.1 || 0.5;
  }
  return rounded(low, high);
}

function short(value, size) {
  if (value !== 0 && (Math.abs(value) >= 1e5 || size < 1e-4)) {
    const digits = Math.floor(Math.log10(Math.abs(value))) - Math.floor(Math.log10(size) + 1e-9);
    return value.toExponential(Math.min(Math.max(0, digits), 4)); // enough to tell the next tick apart
  }
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(size) + 1e-9)));
}

function path(points, x, y) {
  return points.map(([step, value], n) => (n ? "L" : "M") + x(step).toFixed(1) + " " + y(value).toFixed(1)).join("");
}

function evenTicks([low, high]) {
  const size = tickSize(high - low),
    found = [];
  for (let n = 0; low + n * size <= high + size / 2; n += 1) found.push([low + n * size, short(low + n * size, size)]);
  return { low, high, found };
}

// Powers of ten; where the values span less than two of them, also 2 and 5 times each; over a short span even steps.
export function logTicks(values) {
  const [low, high] = extent(values);
  if (high > low && high / low < 2) return evenTicks(rounded(low, high));
  const first = Math.floor(Math.log10(low)),
    last = Math.ceil(Math.log10(high));
  const fine = high / low < 100,
    every = Math.max(1, Math.ceil((last - first) / 5));
  const marks = [];
  for (let power = first; power <= last + every; power += fine ? 1 : every)
    for (const factor of fine ? [1, 2, 5] : [1]) marks.push(Number(`${factor}e${power}`));
  const from = marks.findLastIndex((mark) => mark <= low),
    to = marks.findIndex((mark, n) => mark >= high && n > from);
  const kept = marks.slice(Math.max(0, from), to + 1);
  const name = (value) => (value >= 1e5 || value < 1e-3 ? value.toExponential(0) : String(value));
  return { low: kept[0], high: kept.at(-1), found: kept.map((value) => [value, name(value)]) };
}

function axes(found, first, last, x, y) {
  const parts = [],
    wide = Math.max(1, Math.round(tickSize(last - first)));
  for (const [value, name] of found) {
    const at = y(value);
    parts.push(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }));
    parts.push(svg("text", { class: "tick end", x: LEFT - 6, y: at + 3.5 }, name));
  }
  for (let step = Math.ceil(first / wide) * wide; step <= last; step += wide) {
    parts.push(svg("text", { class: "tick", x: x(step), y: HEIGHT - 8 }, step));
  }
  parts.push(svg("text", { class: "tick end of", x: LEFT - 12, y: HEIGHT - 8 }, "step"));
  return parts;
}

const drawable = (points, log) => (log ? points.filter((p) => p[1] > 0) : points);

// A log axis has no place for values of 0 or less; how many those are is said.
function leftOut(series, log) {
  const all = series.reduce((sum, one) => sum + one.points.length, 0);
  const left = all - series.reduce((sum, one) => sum + drawable(one.points, log).length, 0);
  if (!left) return null;
  if (left === all) return `all ${count(all, "value")} are 0 or less, which a log axis cannot show`;
  return `${count(left, "value is", "values are")} 0 or less and not drawn`;
}

// `series`: [{name, color, points}], every point [step, value]. `point(step)` is called with the step pointed at.
export function chart(title, series, { weight, range, open, point, log }) {
  const seen = series.map((one) => drawable(one.points, log)),
    any = seen.some((points) => points.length),
    [first, last] = range;
  const { low, high, found } = !any
    ? { low: 0, high: 1, found: [] }
    : log
      ? logTicks(seen.flatMap((points) => points.map((p) => p[1])))
      : evenTicks(bounds(seen));
  const level =
    log && any ? (value) => Math.log(value / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
  const x = (step) => LEFT + (last > first ? (step - first) / (last - first) : 0.5) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - level(value)) * (HEIGHT - TOP - BOTTOM);
  const lines = series.flatMap((one, n) => {
    const smoothed = weight > 0 && one.points.length > 12;
    const strong = smoothed ? drawable(smooth(one.points, weight), log) : seen[n];
    const faint = smoothed && svg("path", { class: "line faint " + one.color, d: path(thin(seen[n]), x, y) });
    const dots =
      one.points.length <= 12 &&
      seen[n].map(([s, v]) => svg("circle", { class: "spot " + one.color, cx: x(s), cy: y(v), r: 2.2 }));
    return [faint, svg("path", { class: "line " + one.color, d: path(thin(strong), x, y) }), dots];
  });
  const marks = svg("g");
  const drawing = svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "img",
      "aria-label": title + " by training step" + (log ? ", on a log axis" : ""),
    },
    axes(found, first, last, x, y),
    lines,
    marks,
  );
  const steps = [...new Set(series.flatMap((one) => one.points.map((p) => p[0])))].sort((a, b) => a - b);
  const nearest = (event) => {
    const box = drawing.getBoundingClientRect();
    const at = ((event.clientX - box.left) * WIDTH) / box.width;
    return steps.reduce((a, b) => (Math.abs(x(b) - at) < Math.abs(x(a) - at) ? b : a), steps[0]);
  };
  const mark = (step) => {
    const hits =
      step === null ? [] : series.map((one) => [one, one.points.find((p) => p[0] === step)]).filter((hit) => hit[1]);
    put(
      marks,
      ...(hits.length ? [svg("line", { class: "guide", x1: x(step), x2: x(step), y1: TOP, y2: HEIGHT - BOTTOM })] : []),
      ...hits
        .filter(([, p]) => !log || p[1] > 0)
        .map(([one, p]) => svg("circle", { class: "spot hit " + one.color, cx: x(step), cy: y(p[1]), r: 3.6 })),
    );
    return hits;
  };
  drawing.addEventListener("pointermove", (event) => {
    const step = nearest(event);
    point(step);
    const hits = mark(step);
    showTip(
      event,
      "step " + step,
      hits.map(([one, p]) => [one.name, number(p[1], 4)]),
    );
  });
  drawing.addEventListener("pointerleave", () => {
    point(null);
    hideTip();
  });
  drawing.addEventListener("click", (event) => open(nearest(event)));
  const left = leftOut(series, log);
  const last_values = series.map((one) => h("span", { class: "now " + one.color }, number(one.points.at(-1)?.[1])));
  const card = h(
    "section",
    { class: "card chart", data: { metric: title } },
    h("header", null, h("h2", { title }, title), h("span", null, last_values)),
    left && h("small", { class: "left-out" }, left),
    drawing,
  );
  return { card, mark };
}
