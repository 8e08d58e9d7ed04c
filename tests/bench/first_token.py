"""Measure how much a JSON schema adds to the time to first token of one stream over HTTP, for a schema that the server
has seen and for a new one.

Run on a quiet machine: PYTHONPATH=tests python -m bench.first_token [--turns 40]

The server runs the 0.5B shape with random weights and the tokenizer of bench.structured. Each turn sends one request
without a schema, one with a known schema and one with a new schema of the same size, in changing order. Prints the
medians, the medians of the differences within a turn with their quartiles, and one JSON line.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shlex
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from bench.model import model_folder
from bench.servers import SERVE_LLM, named, running, stop_on_signals
from bench.structured import typical_schema, write_tokenizer
from serve_llm.common.hub import read_config

KINDS = ("no schema", "known schema", "new schema")
KNOWN = typical_schema(0)


def measure(connection: http.client.HTTPConnection, model: str, turn: int, schema: object) -> float:
    """Return the seconds from the request to the first text."""
    body: dict[str, object] = {"model": model, "prompt": f"turn {turn}:", "max_tokens": 4, "stream": True}
    if schema is not None:
        body["structured_outputs"] = {"json": schema}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    found = None
    for line in response:
        if line.startswith(b'data: {"') and found is None and json.loads(line[6:])["choices"]:
            found = time.perf_counter() - began
    if found is None:
        raise RuntimeError("the stream ended without a choice")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    turns = parser.parse_args().turns
    stop_on_signals()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model"
        shutil.copytree(model_folder(), folder)
        write_tokenizer(folder, int(read_config(folder)["vocab_size"]))  # type: ignore[call-overload]
        command = f"{shlex.quote(SERVE_LLM)} {{model}} --port {{port}} --served-model-name bench"
        with running(named(f"serve-llm={command}", str(folder))) as server:
            connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
            for schema in (None, KNOWN, typical_schema(1)):
                measure(connection, "bench", 0, schema)
            for turn in range(1, turns + 1):
                schemas = dict(zip(KINDS, (None, KNOWN, typical_schema(turn + 1)), strict=True))
                for kind in (*KINDS[turn % 3 :], *KINDS[: turn % 3]):
                    times[kind].append(measure(connection, "bench", turn, schemas[kind]))
    for kind in KINDS:
        print(f"{kind:16}{1000 * statistics.median(times[kind]):10.2f} ms")
    differences = {}
    for kind in KINDS[1:]:
        pairs = zip(times[kind], times["no schema"], strict=True)
        low, median, high = statistics.quantiles(one - other for one, other in pairs)
        differences[kind] = median
        print(f"{kind} adds {1000 * median:.2f} ms ({1000 * low:.2f} to {1000 * high:.2f})")
    print(json.dumps({"seconds": times, "differences": differences}))


if __name__ == "__main__":
    main()
