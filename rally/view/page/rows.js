// The table of an exported file: filters and order are the server's, over the rows inside the file, but for two things.
// Words are found inside longer words too, and rows with the same value in the sorted column are in the file's order.

const EXACT = { group: "grp", task: "task", source: "source", id: "id" };
const RANGES = ["step", "reward", "turns", "calls", "tokens", "seconds"];

export function parseRange(text) {
  const parts = text.includes("..") ? text.split("..") : [text, text];
  return parts.map((part) => (part.trim() === "" ? null : Number(part)));
}

function within(value, text) {
  const [low, high] = parseRange(text);
  return value !== null && (low === null || value >= low) && (high === null || value <= high);
}

function wordsOf(answers, run, row) {
  const whole = answers[`runs/${run}/episode?` + new URLSearchParams({ id: row.id })];
  const texts = whole
    ? whole.turns.flatMap((turn) => [turn.text, ...turn.tool_results.map((r) => r.response.text)])
    : [];
  return [row.id, row.task, row.source, row.question, row.answer, ...texts].join("\n").toLowerCase();
}

function keeps(answers, run, row, query) {
  for (const name of RANGES) if (query[name] && !within(row[name], query[name])) return false;
  for (const [name, column] of Object.entries(EXACT)) if (query[name] && row[column] !== query[name]) return false;
  if (query.kind && row.validate !== (query.kind === "val" ? 1 : 0)) return false;
  if (query.stop && !query.stop.split(",").includes(row.stop)) return false;
  if (query.errors && query.errors !== "0" && !row.errors) return false;
  if (!query.text) return true;
  const all = wordsOf(answers, run, row);
  const asked = query.text.toLowerCase().matchAll(/"([^"]*)"|(\S+)/g);
  return [...asked].every(([, quoted, word]) => all.includes(quoted ?? word));
}

function sorted(answers, run, query) {
  const sort = query.sort || "step";
  const sign = (query.desc ?? "1") === "0" ? 1 : -1;
  const key = (row) => row[sort] ?? -Infinity;
  const kept = answers[`runs/${run}/rows`].filter((row) => keeps(answers, run, row, query));
  return kept.sort((a, b) => (key(a) < key(b) ? -sign : key(a) > key(b) ? sign : 0));
}

export function localBeside(answers, run, { id, ...query }) {
  const names = sorted(answers, run, query).map((row) => row.id),
    at = names.indexOf(id);
  if (at < 0) return { at: null, before: null, after: null };
  return { at, before: names[at - 1] ?? null, after: names[at + 1] ?? null };
}

export function localRows(answers, run, query) {
  const kept = sorted(answers, run, query);
  const skip = Number(query.after ?? 0) + Number(query.skip ?? 0);
  const page = kept.slice(skip, skip + Number(query.limit ?? 100));
  return { rows: page, next: skip + page.length < kept.length ? String(skip + page.length) : null, count: kept.length };
}
