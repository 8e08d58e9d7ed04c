// The completion playground: a text, and the model's continuation.

import { streamEvents } from "./api.js";
import { find } from "./dom.js";
import { readCompletionFields } from "./settings.js";
import { RequestTimer } from "./timer.js";
import { readCompletionTokens, TokenView } from "./tokens.js";

let generating = null; // the AbortController of the completion that is being generated

function setGenerating(controller) {
  generating = controller;
  find("complete").disabled = controller !== null;
  find("stop-completion").disabled = controller === null;
  find("continuation").setAttribute("aria-busy", String(controller !== null));
}

function showProblem(text) {
  find("completion-problem").textContent = text;
  find("completion-problem").hidden = !text;
}

async function complete() {
  const controller = new AbortController();
  showProblem("");
  let body = null;
  try {
    body = { ...readCompletionFields(), prompt: find("prompt").value };
  } catch (error) {
    showProblem(error.message);
    return;
  }
  setGenerating(controller);
  find("continuation").textContent = "";
  find("continuation-tokens").replaceChildren();
  const timer = new RequestTimer();
  let tokens = null;
  let outcome = "";
  try {
    for await (const event of streamEvents("v1/completions", body, controller.signal)) {
      timer.read(event);
      const choice = event.choices[0];
      if (choice === undefined) {
        continue;
      }
      find("continuation").append(choice.text);
      const entries = readCompletionTokens(choice.logprobs);
      if (entries.length && tokens === null) {
        tokens = new TokenView();
        find("continuation-tokens").append(tokens.element);
      }
      tokens?.add(entries);
      outcome = choice.finish_reason === "length" ? "cut at the limit of tokens" : outcome;
    }
  } catch (error) {
    outcome = controller.signal.aborted ? "stopped" : "incomplete";
    if (!controller.signal.aborted) {
      showProblem(error.message);
    }
  }
  find("completion-note").textContent = timer.describe(outcome);
  setGenerating(null);
  find("accept").disabled = !find("continuation").textContent;
}

export function stopCompletion() {
  generating?.abort("stop");
}

export function startCompletion() {
  find("completion").addEventListener("submit", (event) => {
    event.preventDefault();
    if (generating === null) {
      complete();
    }
  });
  find("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      find("completion").requestSubmit();
    }
  });
  find("stop-completion").addEventListener("click", stopCompletion);
  find("accept").addEventListener("click", () => {
    find("prompt").value += find("continuation").textContent;
    find("continuation").textContent = "";
    find("continuation-tokens").replaceChildren();
    find("accept").disabled = true;
    find("prompt").focus();
  });
}
