// The settings next to the chat and the completion, as fields of requests.

import { find } from "./dom.js";

const NUMBERS = { temperature: "temperature", "top-p": "top_p", "max-tokens": "max_tokens", seed: "seed" };
const NUM_ALTERNATIVES = 5;

function readNumbers() {
  const fields = {};
  for (const [id, name] of Object.entries(NUMBERS)) {
    if (find(id).value !== "") {
      fields[name] = find(id).valueAsNumber;
    }
  }
  const stop = find("stop-strings").value.split("\n").filter(Boolean);
  return stop.length ? { ...fields, stop } : fields;
}

function readJson(id) {
  // Throws an error that names the box.
  const text = find(id).value.trim();
  find(id).removeAttribute("aria-invalid");
  if (!text) {
    return null;
  }
  try {
    return JSON.parse(text);
  } catch (error) {
    find(id).setAttribute("aria-invalid", "true");
    find(id).closest("details").open = true;
    throw new Error(`${find(id).labels[0].textContent} is not JSON: ${error.message}`);
  }
}

function readCommon() {
  const schema = readJson("schema");
  return {
    model: find("model").value || undefined,
    stream: true,
    stream_options: { include_usage: true },
    return_metrics: true,
    ...readNumbers(),
    ...(schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } } }),
  };
}

export function readChatFields() {
  const tools = readJson("tools");
  return {
    ...readCommon(),
    ...(find("probabilities").checked && { logprobs: true, top_logprobs: NUM_ALTERNATIVES }),
    ...(tools && { tools }),
  };
}

export function readCompletionFields() {
  return { ...readCommon(), ...(find("probabilities").checked && { logprobs: NUM_ALTERNATIVES }) };
}

export function readSystem() {
  return find("system").value.trim();
}
