"""Serve sentence-transformers over standard input and output. For measuring only.

Run with an interpreter that has sentence-transformers: python sentence_encoder.py MODEL --dtype float32. Reads lines,
each a JSON list of texts, and writes lines, each a list of their vectors.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from sentence_transformers import SentenceTransformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    model = SentenceTransformer(given.model, device="cpu", model_kwargs={"dtype": getattr(torch, given.dtype)})
    for line in sys.stdin:
        vectors = model.encode(json.loads(line), batch_size=32, convert_to_tensor=True, show_progress_bar=False)
        print(json.dumps(vectors.float().tolist()), flush=True)


if __name__ == "__main__":
    main()
