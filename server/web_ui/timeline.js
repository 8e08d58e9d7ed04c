// The requests of this tab, with the times that the server measured (`return_metrics`).

import { create, createSvg, DIGITS, find } from "./dom.js";

const MAX_REQUESTS = 20;
const PHASES = [
  ["queue", "queued"],
  ["prefill", "until the first token"],
  ["decode", "until the last token"],
  ["other", "elsewhere: network, checks"],
];

export class RequestTimer {
  constructor(route) {
    this.route = route;
    this.began = performance.now();
    this.time = new Date();
    this.metrics = null;
    this.usage = null;
  }

  read(event) {
    this.metrics = event.metrics ?? this.metrics;
    this.usage = event.usage ?? this.usage;
  }

  end(outcome) {
    // Adds the request to the timeline. Returns a line for people: outcome, tokens, speed.
    const seconds = (performance.now() - this.began) / 1000;
    addToTimeline(this, outcome, 1000 * seconds);
    if (this.usage === null) {
      return outcome;
    }
    const count = this.usage.completion_tokens;
    const speed = this.metrics?.tokens_per_second ?? count / seconds;
    return [outcome, `${count} tokens`, `${DIGITS.format(speed)} tokens/s`].filter(Boolean).join(", ");
  }
}

function addToTimeline(timer, outcome, total) {
  const metrics = timer.metrics ?? {};
  const times = {
    queue: metrics.queue_time_ms ?? 0,
    prefill: metrics.time_to_first_token_ms ?? 0,
    decode: metrics.generation_time_ms ?? 0,
  };
  times.other = Math.max(0, total - times.queue - times.prefill - times.decode);
  const words = PHASES.map(([name, text]) => `${DIGITS.format(times[name])} ms ${text}`).join(", ");
  const bar = createSvg("svg", { viewBox: "0 0 100 4", preserveAspectRatio: "none", role: "img", "aria-label": words });
  let start = 0;
  for (const [name] of PHASES) {
    const width = (100 * times[name]) / Math.max(total, 1);
    bar.append(createSvg("rect", { x: start, y: 0, width, height: 4, class: `phase-${name}` }));
    start += width;
  }
  const cells = [
    timer.time.toLocaleTimeString(),
    timer.route,
    outcome || "complete",
    timer.usage === null ? "" : `${timer.usage.prompt_tokens} + ${timer.usage.completion_tokens}`,
    `${DIGITS.format(total)} ms`,
  ];
  const row = create("tr", { title: words }, ...cells.map((text) => create("td", { textContent: text })));
  row.append(create("td", { className: "bar" }, bar));
  find("timeline").prepend(row);
  find("timeline-empty").hidden = true;
  while (find("timeline").children.length > MAX_REQUESTS) {
    find("timeline").lastChild.remove();
  }
}
