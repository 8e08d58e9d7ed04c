// Requests to the server. Addresses are relative, so that the page also works behind a proxy that adds a path.

import { find } from "./dom.js";

export class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function request(path, options = {}) {
  const headers = { ...options.headers };
  const key = find("api-key").value.trim();
  if (key) {
    headers.Authorization = `Bearer ${key}`;
  }
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (!response.ok) {
    if (response.status === 401) {
      find("key").hidden = false;
    }
    const body = await response.json().catch(() => null);
    throw new HttpError(response.status, body?.error?.message ?? `the server answered with status ${response.status}`);
  }
  return response;
}

export async function* streamEvents(path, body, signal) {
  // Yields the events of a generating route. Throws if the stream ends without its last event.
  const options = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  };
  let rest = "";
  for await (const chunk of readText(await request(path, options))) {
    const events = (rest + chunk).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") {
        return;
      }
      if (event.startsWith("data: ")) {
        const content = JSON.parse(event.slice("data: ".length));
        if (content.error) {
          throw new Error(content.error.message);
        }
        yield content;
      }
    }
  }
  throw new Error("the connection ended before the answer");
}

async function* readText(response) {
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
