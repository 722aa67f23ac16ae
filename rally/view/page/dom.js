// Everything that is shown is made here, from text that stays text: no string is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";
// Tab and newline stay. So does U+200D, the joiner inside emoji. The others could reorder or hide what is around them.
const UNSAFE = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]|\p{Surrogate}/gu;

export function visible(text) {
  return String(text).replace(UNSAFE, (char) => {
    const code = char.charCodeAt(0);
    return code < 0x100 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
  });
}

export function oneLine(text) {
  return visible(text).replaceAll("\n", "\\n").replaceAll("\t", "\\t");
}

// For names and labels, which are short unless somebody wants them not to be.
export function clip(text, most = 200) {
  const whole = oneLine(text);
  return whole.length > most
    ? whole.slice(0, most) + "… (" + whole.length.toLocaleString("en-US") + " characters)"
    : whole;
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : visible(child));
  }
  return element;
}

export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

// Show these instead of what was there.
export function put(element, ...children) {
  element.replaceChildren();
  return fill(element, null, children);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en-US");
  if (size >= 1e6 || size < 0.001) return value.toExponential(2);
  return size < 100 ? value.toFixed(digits) : value.toFixed(1);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return (value * 1e6).toFixed(0) + " µs";
  if (value < 1) return (value * 1e3).toFixed(value < 0.01 ? 1 : 0) + " ms";
  return value < 120 ? value.toFixed(2) + " s" : (value / 60).toFixed(1) + " min";
}

export function count(value, one, many = one + "s") {
  return value.toLocaleString("en-US") + " " + (value === 1 ? one : many);
}

// The one tooltip: lines of [name, value], beside the pointer and inside the window.
export function showTip(event, title, lines = []) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(
    h("b", null, title),
    ...lines.filter(Boolean).map(([name, value]) => h("div", null, h("span", null, name), h("code", null, value))),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const right = event.clientX + 16 + width > innerWidth;
  const below = event.clientY + 20 + height > innerHeight;
  tip.style.left = Math.max(4, right ? event.clientX - width - 12 : event.clientX + 14) + "px";
  tip.style.top = Math.max(4, below ? event.clientY - height - 12 : event.clientY + 18) + "px";
}

export function hideTip() {
  document.getElementById("tip").hidden = true;
}

// A switch of a few words, of which one is chosen.
export function choice(label, options, chosen, pick) {
  const buttons = options.map(([value, name]) =>
    h("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => pick(value) }, name),
  );
  return h("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}

export function stopChip(stop) {
  const tone = stop === "stop" || stop === "tool_success" ? "calm" : stop === "error" ? "bad" : "warn";
  return h("span", { class: "chip " + tone }, stop);
}

export function rewardChip(reward) {
  const tone = reward === null || reward === undefined ? "none" : reward > 0 ? "good" : reward < 0 ? "bad" : "zero";
  return h("span", { class: "score " + tone }, number(reward));
}
