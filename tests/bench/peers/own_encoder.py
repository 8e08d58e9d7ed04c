"""Serve `LLM` as an encoder of texts over standard input and output, like the other encoders here. For measuring only.

Run: python own_encoder.py MODEL --dtype float32 --threads 2. Reads lines, each a JSON list of texts, and writes lines,
each a list of their vectors.
"""

from __future__ import annotations

import argparse
import json
import sys

from serve_llm import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    llm = LLM(given.model, dtype=given.dtype, cpu_threads=given.threads)
    for line in sys.stdin:
        outputs = llm.embed(json.loads(line), use_tqdm=False)
        print(json.dumps([output.outputs.embedding for output in outputs]), flush=True)


if __name__ == "__main__":
    main()
