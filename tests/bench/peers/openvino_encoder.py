"""Serve OpenVINO as an encoder of texts over standard input and output. For measuring only.

Run with an interpreter that has openvino, torch and transformers: python openvino_encoder.py MODEL --dtype float32
--threads 2. MODEL is a checkpoint whose vectors are the first token's hidden states, scaled to length 1. Reads lines,
each a JSON list of texts, and writes lines, each a list of their vectors.
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy
import openvino
import torch
from transformers import AutoModel, AutoTokenizer

NAMES = ("input_ids", "attention_mask")
PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class FirstToken(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask[:, None, None, :].bool()  # transformers cannot build this one while it is traced
        output = self.model(input_ids=input_ids, attention_mask=mask)
        states: torch.Tensor = output.last_hidden_state
        return states[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", choices=PRECISIONS)
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = FirstToken(AutoModel.from_pretrained(given.model, attn_implementation="sdpa").eval())
    example = tokenizer(["a text", "another"], padding=True, return_tensors="pt")
    with torch.no_grad():
        converted = openvino.convert_model(model, example_input=tuple(example[name] for name in NAMES))
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": given.threads,
        "INFERENCE_PRECISION_HINT": PRECISIONS[given.dtype],
    }
    compiled = openvino.compile_model(converted, "CPU", settings)
    for line in sys.stdin:
        encoded = tokenizer(json.loads(line), padding=True, truncation=True, return_tensors="np")
        vectors = compiled(tuple(encoded[name] for name in NAMES))[0]
        vectors = vectors / numpy.linalg.norm(vectors, axis=1, keepdims=True)
        print(json.dumps(vectors.tolist()), flush=True)


if __name__ == "__main__":
    main()
