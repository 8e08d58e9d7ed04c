"""The cost of `--batch-invariant`: the same work with and without it."""

from __future__ import annotations

from floors import LLAMA_8B

from parts import common
from parts.speed import decode_rate, prompt_seconds
from serve_llm import LLM


def main() -> None:
    here = common.place("invariance")
    folder = here.folder(LLAMA_8B)
    batch, context, tokens = here.sized(64, 2), here.sized(1024, 64), here.sized(8192, 128)
    found: list[tuple[float, float]] = []
    for batch_invariant in (False, True):
        with LLM(folder, max_num_seqs=batch, batch_invariant=batch_invariant, **here.options()) as llm:
            rate = batch * decode_rate(llm, batch, context, here.sized(100, 8))
            found.append((rate, tokens / prompt_seconds(llm, tokens)))
    for name, plain, invariant in zip((f"decode, batch {batch}", f"prompt of {tokens}"), *found, strict=True):
        here.report.measured(f"8B: {name}", plain, "tokens/s")
        here.report.measured(f"8B: {name}, --batch-invariant", invariant, "tokens/s")
        here.report.measured(f"8B: {name}, --batch-invariant over without", invariant / plain)


if __name__ == "__main__":
    main()
