"""Offline batch inference with Ray Data: read a file of prompts, write a file with their completions.

    pip install '.[examples]'   # in the repository
    cd examples  # not the repository root: Ray workers import from the current folder, and would find serve_llm/ there
    python offline_batch_ray_data.py demo --device cpu --prompts prompts.jsonl --output answers

Prompts are lines such as {"prompt": "def main():"}; other fields are kept. Ray Data reads the prompts, splits them into
batches and writes the results. Each actor of the pool has one engine, which batches continuously within its batch. Ray
Data places actors on any node of the cluster with free devices.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray

from serve_llm import LLM, SamplingParams


class Generate:
    """Actor with one engine. Takes a batch as columns by name, with one entry per row."""

    def __init__(self, model: str, options: dict[str, Any], params: dict[str, Any]) -> None:
        self._llm = LLM(model, **options)
        self._params = SamplingParams(**params)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        rows = self._complete([str(prompt) for prompt in batch["prompt"]])
        batch["text"] = np.array([text for text, _ in rows], dtype=object)
        batch["error"] = np.array([error for _, error in rows], dtype=object)
        return batch

    def _complete(self, prompts: list[str]) -> list[tuple[str, str]]:
        """Return the text and error of each row.

        An invalid prompt, for example one that is too long, fails only its own row. The engine rejects it before
        generation starts, so bisecting the batch is cheap."""
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
    parser.add_argument("--device", default="auto", help="as for serve-llm; `cpu` requests no GPU")
    parser.add_argument("--max-model-len", help="as for serve-llm")
    parser.add_argument("--batch-size", type=int, default=256, help="rows per call of an engine")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    options: dict[str, Any] = {"device": args.device, "max_model_len": args.max_model_len}
    if args.tensor_parallel_size > 1:
        # The actor reserves all devices, so the engine starts its ranks on the actor's node.
        options |= {"tensor_parallel_size": args.tensor_parallel_size, "distributed_executor_backend": "mp"}
    on_cpu = args.device == "cpu"
    answers = ray.data.read_json(args.prompts).map_batches(
        Generate,
        fn_constructor_args=(args.model, options, {"max_tokens": args.max_tokens, "temperature": args.temperature}),
        batch_size=args.batch_size,
        compute=ray.data.ActorPoolStrategy(size=args.engines),
        num_cpus=args.tensor_parallel_size if on_cpu else 1,
        num_gpus=0 if on_cpu else args.tensor_parallel_size,
    )
    answers.write_json(args.output)


if __name__ == "__main__":
    main()
