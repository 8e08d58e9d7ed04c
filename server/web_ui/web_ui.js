// The page at `/`: a chat, and what the server is doing. Everything that comes from the server is shown as text, never
// as HTML. Addresses are relative, so that the page also works behind a proxy that adds a path.

const STATUS_MILLISECONDS = 2000;
const KEY_ITEM = "serve-llm.api-key";
const DIGITS = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });

const find = (id) => document.getElementById(id);

class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  const key = find("api-key").value.trim();
  if (key) {
    headers.Authorization = `Bearer ${key}`;
  }
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new HttpError(response.status, body?.error?.message ?? `the server answered with status ${response.status}`);
  }
  return response;
}

// Status

let previous = null; // the counters of the last poll

function readCounter(metrics, name) {
  // Of all engines, under any prefix.
  const rows = metrics.matchAll(new RegExp(`^[\\w:]*?${name}\\{.*\\} (\\S+)$`, "gm"));
  return [...rows].reduce((sum, row) => sum + Number(row[1]), 0);
}

function formatDuration(seconds) {
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  return parts.map((part) => String(part).padStart(2, "0")).join(":");
}

function show(id, text) {
  if (find(id).textContent !== text) { // an unchanged text is not announced again
    find(id).textContent = text;
  }
}

function showRates(metrics) {
  const now = {
    seconds: performance.now() / 1000,
    output: readCounter(metrics, "generation_tokens_total"),
    prompt: readCounter(metrics, "prompt_tokens_total"),
  };
  if (previous !== null) {
    const seconds = now.seconds - previous.seconds;
    for (const name of ["output", "prompt"]) {
      show(`${name}-rate`, DIGITS.format(Math.max(0, now[name] - previous[name]) / seconds));
    }
  }
  previous = now;
}

function showStatus(status) {
  const { engines } = status;
  const sum = (read) => engines.reduce((total, engine) => total + read(engine), 0);
  const tokens = sum((engine) => engine.kv_cache.tokens);
  const usage = sum((engine) => engine.kv_cache.usage * engine.kv_cache.tokens) / Math.max(1, tokens);
  const ready = engines.filter((engine) => engine.ready).length;
  show("health", { serving: "Serving", recovering: "An engine is being replaced", draining: "Stopping" }[status.phase]);
  show("served-model", status.model);
  show("running", String(sum((engine) => engine.num_running)));
  show("waiting", String(sum((engine) => engine.num_waiting)));
  show("kv-cache-usage", `${DIGITS.format(100 * usage)} %`);
  show("kv-cache-size", `${tokens.toLocaleString()} tokens`);
  find("kv-cache").value = usage;
  show("engines", `${ready} of ${engines.length} ready`);
  show("restarts", String(status.restarts));
  show("uptime", formatDuration(status.uptime_seconds));
  show("first-cause", status.first_cause ? `Last restart: ${status.first_cause}` : "");
  find("first-cause").hidden = !status.first_cause;
  document.title = `${status.model} - serve-llm`;
}

async function showModels() {
  const { data } = await (await request("v1/models")).json();
  const select = find("model");
  const chosen = select.value;
  select.replaceChildren(...data.map((model) => new Option(model.id, model.id)));
  if (data.some((model) => model.id === chosen)) {
    select.value = chosen;
  }
}

async function poll() {
  try {
    const status = await (await request("status")).json();
    showStatus(status);
    if (![...find("model").options].some((option) => option.value === status.model)) {
      await showModels();
    }
    showRates(await (await request("metrics")).text());
  } catch (error) {
    previous = null;
    const unauthorized = error instanceof HttpError && error.status === 401;
    const unready = error instanceof HttpError && error.status === 503;
    show("health", unauthorized ? "Enter an API key" : unready ? "Starting" : "The server cannot be reached");
  }
}

async function keepPolling() {
  for (;;) {
    if (!document.hidden) {
      await poll();
    }
    await new Promise((resolve) => {
      setTimeout(resolve, STATUS_MILLISECONDS);
    });
  }
}

// Chat

let conversation = []; // messages as the API has them
let generating = null; // the AbortController of the answer that is being generated

class Answer {
  // What is shown of one answer while it comes.
  constructor(item) {
    this.item = item;
    this.text = "";
    this.reasoning = null;
    this.body = item.querySelector(".text");
    this.usage = null;
    this.finishReason = null;
    this.began = performance.now();
  }

  add(event) {
    if (event.error) {
      throw new Error(event.error.message);
    }
    this.usage = event.usage ?? this.usage;
    const choice = event.choices[0];
    if (choice === undefined) {
      return;
    }
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const reasoning = choice.delta.reasoning ?? choice.delta.reasoning_content;
    if (reasoning) {
      this.addReasoning(reasoning);
    }
    if (choice.delta.content) {
      this.text += choice.delta.content;
      this.body.append(choice.delta.content);
    }
  }

  addReasoning(text) {
    if (this.reasoning === null) {
      const details = document.createElement("details");
      const summary = document.createElement("summary");
      summary.textContent = "Reasoning";
      this.reasoning = document.createElement("div");
      this.reasoning.className = "text";
      details.append(summary, this.reasoning);
      this.body.before(details);
    }
    this.reasoning.append(text);
  }

  end(reason) {
    const seconds = (performance.now() - this.began) / 1000;
    const parts = [reason];
    if (this.usage) {
      const count = this.usage.completion_tokens;
      parts.push(`${count} tokens`, `${DIGITS.format(count / seconds)} tokens/s`);
    }
    const note = document.createElement("p");
    note.className = "help";
    note.textContent = parts.filter(Boolean).join(", ");
    this.item.append(note);
  }
}

function addMessage(author, role, text) {
  const item = document.createElement("article");
  item.className = role;
  const name = document.createElement("span");
  name.className = "author";
  name.textContent = author;
  const body = document.createElement("div");
  body.className = "text";
  body.textContent = text;
  item.append(name, body);
  find("messages").append(item);
  scrollToEnd();
  return item;
}

function scrollToEnd() {
  find("messages").scrollTop = find("messages").scrollHeight;
}

function buildBody() {
  const system = find("system").value.trim();
  const body = {
    model: find("model").value || undefined,
    messages: system ? [{ role: "system", content: system }, ...conversation] : conversation,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (find("temperature").value !== "") {
    body.temperature = find("temperature").valueAsNumber;
  }
  if (find("max-tokens").value !== "") {
    body.max_tokens = find("max-tokens").valueAsNumber;
  }
  return JSON.stringify(body);
}

async function* readEvents(response) {
  let rest = "";
  for await (const chunk of streamText(response)) {
    const events = (rest + chunk).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") {
        return;
      }
      if (event.startsWith("data: ")) {
        yield JSON.parse(event.slice("data: ".length));
      }
    }
  }
  throw new Error("the connection ended before the answer");
}

async function* streamText(response) {
  // Not every browser can iterate over a stream.
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) {
      return;
    }
    yield value;
  }
}

function setGenerating(controller) {
  generating = controller;
  find("send").disabled = controller !== null;
  find("stop").disabled = controller === null;
  // Announced as a whole at the end, not word by word.
  find("messages").setAttribute("aria-busy", String(controller !== null));
}

async function send() {
  const message = find("message").value;
  const conversationBefore = conversation;
  const controller = new AbortController();
  find("problem").hidden = true;
  setGenerating(controller);
  const question = addMessage("You", "user", message);
  const answer = new Answer(addMessage("Model", "assistant", ""));
  conversation = [...conversation, { role: "user", content: message }];
  find("message").value = "";
  let reason = null;
  try {
    const headers = { "Content-Type": "application/json" };
    const options = { method: "POST", headers, body: buildBody(), signal: controller.signal };
    for await (const event of readEvents(await request("v1/chat/completions", options))) {
      answer.add(event);
      scrollToEnd();
    }
    reason = answer.finishReason === "length" ? "cut at the limit of tokens" : null;
  } catch (error) {
    if (controller.signal.aborted) {
      reason = "stopped";
    } else {
      reason = "incomplete";
      showProblem(error);
    }
  }
  if (controller.signal.reason === "clear") {
    return;
  }
  setGenerating(null);
  if (answer.text || answer.reasoning !== null || reason === null) {
    answer.end(reason);
    conversation = [...conversation, { role: "assistant", content: answer.text }];
  } else { // there is nothing of it: as if it had not been sent
    question.remove();
    answer.item.remove();
    conversation = conversationBefore;
    find("message").value = find("message").value || message;
  }
}

function showProblem(error) {
  find("problem").textContent = error.message;
  find("problem").hidden = false;
  if (error instanceof HttpError && error.status === 401) {
    find("api-key").focus();
  }
}

function clearChat() {
  generating?.abort("clear");
  setGenerating(null);
  conversation = [];
  find("messages").replaceChildren();
  find("problem").hidden = true;
  find("message").focus();
}

find("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  if (generating === null) {
    send();
  }
});
find("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("chat").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    generating?.abort("stop");
  }
});
find("stop").addEventListener("click", () => generating?.abort("stop"));
find("clear").addEventListener("click", clearChat);
find("api-key").value = sessionStorage.getItem(KEY_ITEM) ?? "";
find("api-key").addEventListener("change", () => {
  sessionStorage.setItem(KEY_ITEM, find("api-key").value.trim());
  poll();
});
keepPolling();
