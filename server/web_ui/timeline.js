// The requests of all clients, with the times that the server measured: /requests.

import { request } from "./api.js";
import { create, createSvg, DIGITS, find } from "./dom.js";

const PHASES = [
  ["queue", "queued"],
  ["prefill", "until the first token"],
  ["decode", "until the last token"],
];
const OUTCOMES = { stop: "complete", length: "cut at the limit of tokens", abort: "aborted", error: "failed" };

let drawn = ""; // the JSON of the requests that are shown

function sumPhases(entry) {
  return PHASES.reduce((total, [name]) => total + (entry[`${name}_time_ms`] ?? 0), 0);
}

function describeState(entry) {
  const openState = entry.prefill_time_ms === null ? "waiting" : "running";
  const state = entry.outcome === null ? openState : OUTCOMES[entry.outcome];
  return entry.replays ? `${state}, replays: ${entry.replays}` : state;
}

function buildBar(entry, longest) {
  // All bars have one scale, so that their lengths can be compared.
  const words = PHASES.filter(([name]) => entry[`${name}_time_ms`] !== null)
    .map(([name, text]) => `${DIGITS.format(entry[`${name}_time_ms`])} ms ${text}`)
    .join(", ");
  const bar = createSvg("svg", { viewBox: "0 0 100 4", preserveAspectRatio: "none", role: "img", "aria-label": words });
  let start = 0;
  for (const [name] of PHASES) {
    const width = (100 * (entry[`${name}_time_ms`] ?? 0)) / Math.max(longest, 1);
    bar.append(createSvg("rect", { x: start, y: 0, width, height: 4, class: `phase-${name}` }));
    start += width;
  }
  return bar;
}

function buildRow(entry, longest) {
  const cells = [
    new Date(1000 * entry.time).toLocaleTimeString(),
    entry.route,
    entry.model,
    String(entry.key),
    entry.engines.join(", "),
    describeState(entry),
    `${entry.prompt_tokens} + ${entry.generated_tokens}`,
    `${DIGITS.format(sumPhases(entry))} ms`,
  ];
  const row = create("tr", { title: `id ${entry.id}` }, ...cells.map((text) => create("td", { textContent: text })));
  row.append(create("td", { className: "bar" }, buildBar(entry, longest)));
  return row;
}

export async function showTimeline() {
  const { requests } = await (await request("requests")).json();
  const shown = JSON.stringify(requests);
  if (shown === drawn) {
    return;
  }
  drawn = shown;
  const longest = Math.max(0, ...requests.map(sumPhases));
  find("timeline").replaceChildren(...requests.map((entry) => buildRow(entry, longest)));
  find("timeline-empty").hidden = requests.length > 0;
}
