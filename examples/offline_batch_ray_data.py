"""Offline batch inference with Ray Data: a file of prompts in, a file with their continuations out.

    pip install 'serve-llm[examples]'
    cd examples  # not the repository's root: Ray lets its workers import from there, where serve_llm is but a folder
    python offline_batch_ray_data.py demo --device cpu --prompts prompts.jsonl --output answers

The prompts are lines such as {"prompt": "def main():"}; other fields are kept. Ray Data reads, cuts into batches and
writes; each actor of the pool holds one engine, which batches continuously within what it is given. Ray Data puts
actors where devices are free, on any node of the cluster.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray

from serve_llm import LLM, SamplingParams


class Generate:
    """One engine. Called with a batch: columns by name, one entry per row."""

    def __init__(self, model: str, options: dict[str, Any], params: dict[str, Any]) -> None:
        self._llm = LLM(model, **options)
        self._params = SamplingParams(**params)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        rows = self._complete([str(prompt) for prompt in batch["prompt"]])
        batch["text"] = np.array([text for text, _ in rows], dtype=object)
        batch["error"] = np.array([error for _, error in rows], dtype=object)
        return batch

    def _complete(self, prompts: list[str]) -> list[tuple[str, str]]:
        """Text and error of each row: a prompt that cannot be served, such as one that is too long, fails its own row
        and not the whole job. It is refused before anything runs, so looking for it by halves costs little."""
        try:
            outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
        except ValueError as error:
            if len(prompts) == 1:
                return [("", str(error))]
            half = len(prompts) // 2
            return self._complete(prompts[:half]) + self._complete(prompts[half:])
        return [(output.outputs[0].text, "") for output in outputs]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Offline batch inference with Ray Data.")
    parser.add_argument("model")
    parser.add_argument("--prompts", required=True, help="JSON lines, a file or a folder of files")
    parser.add_argument("--output", required=True, help="folder for JSON lines with `text` and `error`")
    parser.add_argument("--engines", type=int, default=1, help="actors, each with an engine")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices per engine, all on one node")
    parser.add_argument("--device", default="auto", help="as for serve-llm; with `cpu` no GPU is asked for")
    parser.add_argument("--max-model-len", help="as for serve-llm")
    parser.add_argument("--batch-size", type=int, default=256, help="rows that an engine is given at a time")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


def main() -> None:
    given = parse_args()
    options: dict[str, Any] = {"device": given.device, "max_model_len": given.max_model_len}
    if given.tensor_parallel_size > 1:
        # Every rank on the actor's node, started by the engine itself: the actor holds all of the devices.
        options |= {"tensor_parallel_size": given.tensor_parallel_size, "distributed_executor_backend": "mp"}
    on_cpu = given.device == "cpu"
    answers = ray.data.read_json(given.prompts).map_batches(
        Generate,
        fn_constructor_args=(given.model, options, {"max_tokens": given.max_tokens, "temperature": given.temperature}),
        batch_size=given.batch_size,
        compute=ray.data.ActorPoolStrategy(size=given.engines),
        num_cpus=given.tensor_parallel_size if on_cpu else 1,
        num_gpus=0 if on_cpu else given.tensor_parallel_size,
    )
    answers.write_json(given.output)


if __name__ == "__main__":
    main()
