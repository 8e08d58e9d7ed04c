// What the server is doing: polls /status, /metrics and /requests every two seconds while the tab is visible.

import { HttpError, request } from "./api.js";
import { create, createTable, DIGITS, find, show } from "./dom.js";
import { showEngines, showFrontEnds } from "./engines.js";
import { quantiles, rate, Scrape } from "./metrics.js";
import { Plot } from "./plot.js";
import { showTimeline } from "./timeline.js";

const POLL_MILLISECONDS = 2000;
const PHASES = { serving: "Serving", recovering: "An engine is being replaced", draining: "Stopping" };

let previous = null; // the last scrape
let plots = null;
let drawn = ""; // the JSON of the restarts that are shown

function createPlots() {
  const container = find("plots");
  return {
    tokens: new Plot(container, "Tokens", ["output", "prompt"], "/s"),
    queue: new Plot(container, "Requests", ["running", "waiting"], ""),
    cache: new Plot(container, "KV cache in use", ["all engines"], "%"),
    first: new Plot(container, "Time to first token", ["median", "p90", "p99"], "ms"),
    between: new Plot(container, "Time between tokens", ["median", "p90", "p99"], "ms"),
    whole: new Plot(container, "Whole requests", ["median", "p90", "p99"], "s"),
  };
}

function formatDuration(seconds) {
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  return parts.map((part) => String(part).padStart(2, "0")).join(":");
}

function summarize(engines) {
  const sum = (read) => engines.reduce((total, engine) => total + read(engine), 0);
  const tokens = sum((engine) => engine.kv_cache.tokens);
  return {
    tokens,
    usage: sum((engine) => engine.kv_cache.usage * engine.kv_cache.tokens) / Math.max(1, tokens),
    running: sum((engine) => engine.num_running),
    waiting: sum((engine) => engine.num_waiting),
    ready: engines.filter((engine) => engine.ready).length,
  };
}

function showStatus(status) {
  const { tokens, usage, running, waiting, ready } = summarize(status.engines);
  show("health", PHASES[status.phase]);
  show("served-model", status.model);
  show("running", String(running));
  show("waiting", String(waiting));
  show("kv-cache-usage", `${DIGITS.format(100 * usage)} %`);
  show("kv-cache-size", `${tokens.toLocaleString()} tokens`);
  find("kv-cache").value = usage;
  show("num-engines", `${ready} of ${status.engines.length} ready`);
  show("num-restarts", String(status.restarts));
  show("uptime", formatDuration(status.uptime_seconds));
  const refused = Object.entries(status.queue.refused).filter(([, count]) => count > 0);
  show("refused", refused.map(([reason, count]) => `${reason} ${count}`).join(", ") || "0");
  show("versions", Object.entries(status.versions).map((pair) => pair.join(" ")).join(", "));
  document.title = `${status.model} - serve-llm`;
  showQueue(status.queue);
  showEngines(status.engines);
  showFrontEnds(status.front_ends);
  const shown = JSON.stringify(status.recent_restarts);
  if (shown !== drawn) { // so that what a reader is at does not vanish
    drawn = shown;
    showRestarts(status.recent_restarts);
  }
  return [running, waiting, 100 * usage];
}

function showQueue(queue) {
  show("queue", `${queue.waiting_requests} of ${queue.max_requests.toLocaleString()}`);
  const [tokens, limit] = [queue.waiting_prompt_tokens, queue.max_prompt_tokens].map((count) => count.toLocaleString());
  show("queue-tokens", `${tokens} of ${limit} tokens`);
}

function showRestarts(restarts) {
  const rows = restarts.map((restart) => [
    new Date(1000 * restart.time).toLocaleTimeString(),
    String(restart.engine),
    restart.reason,
    restart.cause,
  ]);
  const table = createTable("The newest first", ["Time", "Engine", "Reason", "First cause"], rows);
  find("restarts").replaceChildren(rows.length ? table : create("p", { className: "help", textContent: "None." }));
}

function showScrape(scrape, [running, waiting, usage]) {
  plots ??= createPlots();
  if (previous !== null) {
    const milliseconds = (name) =>
      quantiles(previous, scrape, name).map((value) => (value === null ? null : 1000 * value));
    const output = rate(previous, scrape, "generation_tokens_total");
    const prompt = rate(previous, scrape, "prompt_tokens_total");
    show("output-rate", DIGITS.format(output));
    show("prompt-rate", DIGITS.format(prompt));
    plots.tokens.add([output, prompt]);
    plots.first.add(milliseconds("time_to_first_token_seconds"));
    plots.between.add(milliseconds("inter_token_latency_seconds"));
    plots.whole.add(quantiles(previous, scrape, "e2e_request_latency_seconds"));
  }
  plots.queue.add([running, waiting]);
  plots.cache.add([usage]);
  previous = scrape;
}

async function showModels() {
  const { data } = await (await request("v1/models")).json();
  const select = find("model");
  const ids = data.map((model) => model.id);
  if (ids.join("\n") === [...select.options].map((option) => option.value).join("\n")) {
    return; // an open list would close
  }
  const chosen = select.value;
  select.replaceChildren(...ids.map((id) => new Option(id, id)));
  if (ids.includes(chosen)) {
    select.value = chosen;
  }
}

export async function poll() {
  try {
    const status = await (await request("status")).json();
    const gauges = showStatus(status);
    await showModels();
    showScrape(new Scrape(await (await request("metrics")).text()), gauges);
    if (!find("status-panel").hidden) {
      await showTimeline();
    }
  } catch (error) {
    previous = null;
    const unauthorized = error instanceof HttpError && error.status === 401;
    const unready = error instanceof HttpError && error.status === 503;
    show("health", unauthorized ? "Enter an API key" : unready ? "Starting" : "The server cannot be reached");
  }
}

export async function keepPolling() {
  for (;;) {
    if (!document.hidden) {
      await poll();
    }
    await new Promise((resolve) => {
      setTimeout(resolve, POLL_MILLISECONDS);
    });
  }
}
