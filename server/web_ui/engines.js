// The engines as a picture: their ranks and hosts, and the load of each; and the front ends, if there are any.

import { create, createTable, DIGITS, find, show } from "./dom.js";

let drawn = ""; // the JSON of what is drawn anew when it changes

export function showEngines(engines) {
  const shown = JSON.stringify(engines.map((engine) => [describeState(engine), engine.ranks]));
  if (shown !== drawn) { // so that what a reader is at does not vanish
    drawn = shown;
    find("engines").replaceChildren(...engines.map(buildEngine));
  }
  engines.forEach(updateLoad);
}

function describeState(engine) {
  if (engine.draining) {
    return "draining";
  }
  return engine.ready ? "ready" : "being replaced";
}

function buildEngine(engine, number) {
  // A row for each stage, a cell for each of its ranks, coloured by host.
  const hosts = [...new Set(engine.ranks.map((rank) => rank.host))];
  const rows = [];
  for (const rank of engine.ranks) {
    (rows[rank.pp_rank] ??= []).push(
      create(
        "td",
        { className: `host-${hosts.indexOf(rank.host) % 6}` },
        create("strong", { textContent: `rank ${rank.rank}` }),
        create("span", { textContent: rank.host }),
      ),
    );
  }
  const state = describeState(engine);
  const body = rows.map((cells, stage) =>
    create("tr", {}, create("th", { scope: "row", textContent: `stage ${stage}` }), ...cells),
  );
  const caption = create("caption", { textContent: `Engine ${number}: ${state}` });
  const meter = create("meter", { id: `engine-${number}-kv-cache`, min: 0, max: 1 });
  meter.setAttribute("aria-label", `KV cache of engine ${number} in use`);
  const load = create("p", {}, create("span", { id: `engine-${number}-load` }), meter);
  const names = { ready: "engine", draining: "engine draining", "being replaced": "engine lost" };
  return create("div", { className: names[state] }, create("table", {}, caption, create("tbody", {}, ...body)), load);
}

function updateLoad(engine, number) {
  const share = DIGITS.format(100 * engine.kv_cache.usage);
  const text = `${engine.num_running} running, ${engine.num_waiting} waiting, KV cache ${share} %`;
  show(`engine-${number}-load`, text);
  find(`engine-${number}-kv-cache`).value = engine.kv_cache.usage;
}

export function showFrontEnds(frontEnds) {
  const rows = frontEnds.map(({ pid, host, phase, num_open: numOpen }) => [
    String(pid),
    host ?? "the server's",
    phase,
    String(numOpen),
  ]);
  const heads = ["Process", "Host", "Phase", "Open requests"];
  find("front-ends").replaceChildren(createTable("Processes that answer clients", heads, rows));
  find("front-ends-section").hidden = rows.length === 0;
}
