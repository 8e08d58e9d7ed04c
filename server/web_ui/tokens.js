// Tokens of an answer, coloured by how unlikely they were.

import { create, createTable, DIGITS } from "./dom.js";

const formatShare = (logprob) => `${DIGITS.format(100 * Math.exp(logprob))} %`;

export class TokenView {
  // A folded list of tokens. The focused one (by arrow keys or a click) shows the alternatives.

  constructor() {
    this.list = create("div", { className: "tokens" });
    this.list.setAttribute("role", "listbox");
    this.list.setAttribute("aria-label", "Tokens");
    this.choice = create("div");
    this.choice.setAttribute("role", "status");
    const summary = create("summary", { textContent: "Token probabilities" });
    this.element = create("details", { className: "token-view" }, summary, this.list, this.choice);
    this.entries = [];
    this.list.addEventListener("click", (event) => this.select([...this.list.children].indexOf(event.target)));
    this.list.addEventListener("keydown", (event) => this.move(event));
  }

  add(entries) {
    // entries: {token, logprob, top: [{token, logprob}]}
    for (const entry of entries) {
      const option = create("span", { textContent: showSpaces(entry.token), tabIndex: this.entries.length ? -1 : 0 });
      option.setAttribute("role", "option");
      option.setAttribute("aria-selected", "false");
      option.title = formatShare(entry.logprob);
      option.style.setProperty("--surprise", `${Math.round(70 * (1 - Math.exp(entry.logprob)))}%`);
      this.list.append(option);
      this.entries.push(entry);
    }
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step !== undefined) {
      event.preventDefault();
      this.select([...this.list.children].indexOf(document.activeElement) + step);
    }
  }

  select(index) {
    const entry = this.entries[index];
    if (entry === undefined) {
      return;
    }
    [...this.list.children].forEach((option, number) => {
      option.tabIndex = number === index ? 0 : -1;
      option.setAttribute("aria-selected", String(number === index));
    });
    this.list.children[index].focus();
    const rows = entry.top.map((one) => [showSpaces(one.token), formatShare(one.logprob)]);
    const caption = `${showSpaces(entry.token)}: ${formatShare(entry.logprob)}`;
    this.choice.replaceChildren(createTable(caption, ["Most likely", "Probability"], rows));
  }
}

function showSpaces(token) {
  return token.replaceAll("\n", "\u23ce").replace(/^ | $/g, "\u00b7") || "\u2205";
}

export function readChatTokens(logprobs) {
  return (logprobs?.content ?? []).map(({ token, logprob, top_logprobs: top }) => ({ token, logprob, top }));
}

export function readCompletionTokens(logprobs) {
  return (logprobs?.tokens ?? []).map((token, index) => ({
    token,
    logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs[index] ?? {}).map(([text, logprob]) => ({ token: text, logprob })),
  }));
}
