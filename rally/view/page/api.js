// Where the data is: asked of the server, or inside this very file when it was exported. The views do not know which.

import { localBeside, localRows } from "./rows.js";

const inside = document.getElementById("data");
export const exported = inside ? JSON.parse(inside.textContent) : null;
export const NO_EPISODES = exported
  ? "No episodes of this run are in the file; `rally view` over the run folder shows them."
  : "No episodes are recorded yet.";

export async function get(path, params) {
  const query = params ? "?" + new URLSearchParams(params) : "";
  if (exported) {
    const found = exported.answers[path + query];
    if (found === undefined)
      throw new Error("This is not in the exported file; `rally view` over the run folder shows it.");
    return found;
  }
  const answer = await fetch("/api/" + path + query, { headers: { accept: "application/json" } });
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error ?? "the server answered " + answer.status);
  return value;
}

export async function rows(run, query) {
  if (exported) return localRows(exported.answers, run, query);
  return get(`runs/${run}/rows`, query);
}

// Where an episode is in a table, and which are before and after it.
export async function beside(run, query) {
  if (exported) return localBeside(exported.answers, run, query);
  return get(`runs/${run}/beside`, query);
}

// Only the metrics that are drawn travel; a long run has millions of numbers.
export async function metrics(run, names) {
  if (exported) return exported.answers[`runs/${run}/metrics`];
  return get(
    `runs/${run}/metrics`,
    names.map((name) => ["name", name]),
  );
}

// Images are known by their content; where one comes from is decided here alone.
export async function episode(run, id) {
  const found = await get(`runs/${run}/episode`, { id });
  for (const span of found.segments.flatMap((segment) => segment.images)) {
    const path = `runs/${run}/images/${encodeURIComponent(span.hash)}`;
    span.source = exported ? exported.answers[path] : "/api/" + path;
  }
  return found;
}

// How many episodes of a run there are to look at here.
export function recorded(run, state) {
  return exported ? exported.answers[`runs/${run}/rows`].length : (state?.episodes ?? 0);
}
