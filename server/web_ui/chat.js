// The chat: messages in the API's form, and their elements.

import { HttpError, streamEvents } from "./api.js";
import { create, createButton, find } from "./dom.js";
import { createCopyButton, MarkdownView } from "./markdown.js";
import { readChatFields, readSystem } from "./settings.js";
import { RequestTimer } from "./timer.js";
import { readChatTokens, TokenView } from "./tokens.js";

let messages = []; // {role, content, ...}, each with its element in `elements` at the same index
let elements = [];
let generating = null; // the AbortController of the answer that is being generated

class Answer {
  // Shows one answer while it is generated.

  constructor() {
    this.text = "";
    this.reasoning = "";
    this.reasoningField = "reasoning";
    this.calls = [];
    this.finishReason = null;
    this.body = create("div", { className: "markdown" });
    this.element = create("article", { className: "assistant" }, createAuthor("Model"), this.body);
    this.view = new MarkdownView(this.body);
    this.reasoningBody = null;
    this.tokens = null;
    this.frame = null;
  }

  get isEmpty() {
    return !this.text && !this.reasoning && !this.calls.length;
  }

  get message() {
    return {
      role: "assistant",
      content: this.text || (this.calls.length ? null : ""),
      ...(this.reasoning && { [this.reasoningField]: this.reasoning }),
      ...(this.calls.length && { tool_calls: this.calls }),
    };
  }

  add(event) {
    const choice = event.choices[0];
    if (choice === undefined) {
      return;
    }
    const { delta } = choice;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    for (const name of ["reasoning", "reasoning_content"]) {
      if (delta[name]) {
        this.reasoningField = name;
        this.addReasoning(delta[name]);
      }
    }
    for (const part of delta.tool_calls ?? []) {
      this.addCallPart(part);
    }
    this.addTokens(readChatTokens(choice.logprobs));
    if (delta.content) {
      this.text += delta.content;
      this.frame ??= requestAnimationFrame(() => this.draw()); // a fast model writes more often than a screen shows
    }
  }

  draw(isComplete = false) {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const isAtEnd = isScrolledToEnd();
    this.view.update(this.text, isComplete);
    if (isAtEnd) {
      scrollToEnd();
    }
  }

  addReasoning(text) {
    if (this.reasoningBody === null) {
      this.reasoningBody = create("div", { className: "text" });
      const summary = create("summary", { textContent: "Reasoning" });
      this.body.before(create("details", {}, summary, this.reasoningBody));
    }
    this.reasoning += text;
    this.reasoningBody.append(text);
  }

  addCallPart(part) {
    if (this.calls[part.index] === undefined) {
      this.calls[part.index] = { id: part.id, type: "function", function: { name: "", arguments: "" } };
    }
    const call = this.calls[part.index];
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }

  addTokens(entries) {
    if (entries.length && this.tokens === null) {
      this.tokens = new TokenView();
      this.element.append(this.tokens.element);
    }
    this.tokens?.add(entries);
  }

  end(note) {
    this.draw(true);
    this.element.append(create("p", { className: "help", textContent: note }));
    if (this.calls.length) {
      this.element.append(buildCalls(this.calls));
    }
    const buttons = create("div", { className: "message-buttons" });
    buttons.append(createButton("Regenerate", () => regenerate(this.element)));
    if (navigator.clipboard) {
      buttons.append(createCopyButton(this.text, "Copy the answer"));
    }
    this.element.append(buttons);
  }
}

function createAuthor(name) {
  return create("span", { className: "author", textContent: name });
}

function buildCalls(calls) {
  // Shows the calls of an answer, with a form for their results.
  const form = create("div", { className: "calls" });
  const boxes = calls.map((call, index) => {
    const box = create("textarea", { rows: 2, id: `result-${call.id}-${index}` });
    const label = create("label", { textContent: `Result of ${call.function.name}`, htmlFor: box.id });
    const text = create("pre", { tabIndex: 0, textContent: formatArguments(call.function.arguments) });
    form.append(create("h3", { textContent: `Call of ${call.function.name}` }), text, label, box);
    return box;
  });
  const button = createButton("Send results", () => {
    if (generating !== null) {
      return;
    }
    boxes.forEach((box, index) => {
      box.disabled = true;
      addMessage({ role: "tool", tool_call_id: calls[index].id, content: box.value }, "Tool");
    });
    button.remove();
    generate();
  });
  form.append(button);
  return form;
}

function formatArguments(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // cut by the limit of tokens
  }
}

function addMessage(message, author) {
  const text = create("div", { className: "text", textContent: message.content });
  const element = create("article", { className: message.role }, createAuthor(author), text);
  if (message.role === "user") {
    const edit = createButton("Edit", () => editMessage(element, text));
    element.append(create("div", { className: "message-buttons" }, edit));
  }
  append(message, element);
  find("messages").append(element);
  scrollToEnd();
}

function append(message, element) {
  messages.push(message);
  elements.push(element);
}

function truncate(count) {
  // Keep the first messages only.
  elements.slice(count).forEach((element) => element.remove());
  messages = messages.slice(0, count);
  elements = elements.slice(0, count);
}

function editMessage(element, text) {
  const index = elements.indexOf(element);
  const box = create("textarea", { rows: 3, value: messages[index].content });
  box.setAttribute("aria-label", "Edited message");
  const buttons = element.querySelector(".message-buttons");
  const close = () => {
    form.replaceWith(text);
    buttons.hidden = false;
  };
  const send = createButton("Send again", () => {
    if (generating === null && box.value.trim()) {
      replaceFrom(elements.indexOf(element), () => addMessage({ role: "user", content: box.value }, "You"));
    }
  });
  const form = create("div", {}, box, send, createButton("Cancel", close));
  text.replaceWith(form);
  buttons.hidden = true;
  box.focus();
}

function regenerate(element) {
  if (generating === null) {
    replaceFrom(elements.indexOf(element), () => {});
  }
}

async function replaceFrom(index, addMessages) {
  // Generate another continuation from a message on. If there is no answer, the old one stays.
  const oldMessages = messages.slice(index);
  const oldElements = elements.slice(index);
  truncate(index);
  addMessages();
  if (await generate()) {
    return;
  }
  truncate(index);
  oldMessages.forEach((message, number) => append(message, oldElements[number]));
  find("messages").append(...oldElements);
}

function isScrolledToEnd() {
  const box = find("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 40;
}

function scrollToEnd() {
  find("messages").scrollTop = find("messages").scrollHeight;
}

function setGenerating(controller) {
  generating = controller;
  find("send").disabled = controller !== null;
  find("stop").disabled = controller === null;
  // Announced as a whole at the end, not word by word.
  find("messages").setAttribute("aria-busy", String(controller !== null));
}

async function generate() {
  // Answer the messages so far. Returns whether there is an answer.
  const controller = new AbortController();
  find("problem").hidden = true;
  let body = null;
  try {
    const system = readSystem();
    body = { ...readChatFields(), messages: system ? [{ role: "system", content: system }, ...messages] : messages };
  } catch (error) {
    showProblem(error);
    return false;
  }
  setGenerating(controller);
  const timer = new RequestTimer();
  const answer = new Answer();
  find("messages").append(answer.element);
  scrollToEnd();
  let outcome = "";
  try {
    for await (const event of streamEvents("v1/chat/completions", body, controller.signal)) {
      timer.read(event);
      answer.add(event);
    }
    outcome = answer.finishReason === "length" ? "cut at the limit of tokens" : "";
  } catch (error) {
    outcome = controller.signal.aborted ? "stopped" : "incomplete";
    if (!controller.signal.aborted) {
      showProblem(error);
    }
  }
  const note = timer.describe(outcome);
  if (controller.signal.reason === "clear") {
    return true;
  }
  setGenerating(null);
  if (answer.isEmpty && outcome) {
    answer.element.remove();
    return false;
  }
  append(answer.message, answer.element);
  answer.end(note);
  return true;
}

async function send() {
  const content = find("message").value;
  const count = messages.length;
  addMessage({ role: "user", content }, "You");
  find("message").value = "";
  if (!(await generate())) { // there is nothing of it: as if it had not been sent
    truncate(count);
    find("message").value = find("message").value || content;
  }
}

function showProblem(error) {
  find("problem").textContent = error.message;
  find("problem").hidden = false;
  if (error instanceof HttpError && error.status === 401) {
    find("api-key").focus();
  }
}

function clear() {
  generating?.abort("clear");
  setGenerating(null);
  truncate(0);
  find("messages").replaceChildren();
  find("problem").hidden = true;
  find("message").focus();
}

export function stopChat() {
  generating?.abort("stop");
}

export function startChat() {
  find("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    if (generating === null && find("message").value.trim()) {
      send();
    }
  });
  find("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      find("chat").requestSubmit();
    }
  });
  find("stop").addEventListener("click", stopChat);
  find("clear").addEventListener("click", clear);
}
