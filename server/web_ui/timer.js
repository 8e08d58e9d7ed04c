// The size and speed of an answer in this tab, as the server reports them (`return_metrics`).

import { DIGITS } from "./dom.js";

export class RequestTimer {
  constructor() {
    this.began = performance.now();
    this.metrics = null;
    this.usage = null;
  }

  read(event) {
    this.metrics = event.metrics ?? this.metrics;
    this.usage = event.usage ?? this.usage;
  }

  describe(outcome) {
    // A line for people: outcome, tokens, speed.
    if (this.usage === null) {
      return outcome;
    }
    const seconds = (performance.now() - this.began) / 1000;
    const count = this.usage.completion_tokens;
    const speed = this.metrics?.tokens_per_second ?? count / seconds;
    return [outcome, `${count} tokens`, `${DIGITS.format(speed)} tokens/s`].filter(Boolean).join(", ");
  }
}
