"""The daemon under load, compared with the same work offline: output tokens per second, first tokens, time between
tokens."""

from __future__ import annotations

import dataclasses

from floors import LLAMA_8B

from bench import load
from bench.model import IDS
from bench.servers import named, running
from bench.workloads import Workload
from parts import common
from parts.speed import generate
from serve_llm import LLM


def main() -> None:
    here = common.place("server")
    folder = here.folder(LLAMA_8B)
    prompt, output = here.sized(512, 16), here.sized(192, 8)
    offline: dict[int, float] = {}
    streams = (here.sized(64, 2), here.sized(256, 4))
    with LLM(folder, max_num_seqs=max(streams), **here.options()) as llm:
        for count in streams:
            generate(llm, count, 32, 8, seed=1)
            offline[count] = 2 * count * output / sum(generate(llm, count, prompt, output, seed) for seed in (2, 3))
    recipe = named("serve-llm", folder)
    command = (*recipe.command, f"--max-num-seqs={max(streams)}", *here.words())
    recipe = dataclasses.replace(recipe, name="gpu-check", command=command)
    with running(recipe) as server:
        for count in streams:
            load.run(server.url, Workload("warm", count, 32, 8, count), 0, IDS)
            result = load.run(server.url, Workload(f"{count} streams", count, prompt, output, 2 * count), 1, IDS)
            rate = result.tokens_per_second
            here.report.measured(f"{count} streams over HTTP", rate, "tokens/s")
            here.report.measured(f"{count} streams over HTTP, over offline", rate / offline[count], aim=0.9)
            here.report.measured(f"{count} streams: first token, median", result.ttft_p50, "s")
            here.report.measured(f"{count} streams: between tokens, p99", result.itl_p99 * 1000, "ms")
            here.report.check(f"{count} streams without errors", result.errors == 0, result.first_error or "ok")


if __name__ == "__main__":
    main()
