"""Measure embeddings per second of this server, sentence-transformers and OpenVINO, in turns on the same checkpoint.

Run: PYTHONPATH=tests python -m bench.embeddings [--peer PYTHON] [--openvino PYTHON] [--dtype float32 bfloat16]
    [--shape small base]

PYTHON is an interpreter with sentence-transformers, or with openvino, torch and transformers. The checkpoint is a BERT
with random weights in the shape of bge-small or bge-base. The server is asked over one HTTP connection by a client that
waits for each answer (batch 1) or sends one request with all texts (batch 32); `LLM`, the offline class, and the peers
encode in their own processes, without HTTP. All embed the same texts, and their vectors are compared first. Prints a
table of texts per second, then one JSON line. On a shared machine, compare --threads 1 and the texts per second of CPU
time over all processes.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from bench.servers import SERVE_LLM, free_port, stop_on_signals
from support.pooled import write_modules

SHAPES = {
    "small": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 12},
    "base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
}
WORDS = 8000
LENGTHS = (32, 512)
BATCHES = (1, 32)
SECONDS = 1.5  # minimum duration of a turn
PEERS = Path(__file__).parent / "peers"

Vectors = list[list[float]]
Encode = Callable[[list[str]], Vectors]


def write_model(folder: Path, shape: str) -> None:
    """Write a checkpoint in sentence-transformers' format, with a tokenizer whose tokens are words."""
    config = BertConfig(vocab_size=WORDS + 4, max_position_embeddings=512, **SHAPES[shape])
    torch.manual_seed(1)
    BertModel(config).save_pretrained(folder)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=512,
    ).save_pretrained(folder)
    write_modules(folder, ["Pooling", "Normalize"], "cls_token", int(SHAPES[shape]["hidden_size"]))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))


def write_texts(chooser: random.Random, num_tokens: int, count: int) -> list[str]:
    return [" ".join(f"w{chooser.randrange(WORDS)}" for _ in range(num_tokens - 2)) for _ in range(count)]


class OwnServer:
    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        port = free_port()
        command = f"{shlex.quote(SERVE_LLM)} {folder} --port {port} --dtype {dtype} --cpu-threads {threads}"
        self._process = subprocess.Popen(shlex.split(command), stderr=subprocess.DEVNULL)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        while not self._is_ready():
            assert self._process.poll() is None, "the server ended"
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            self._connection.request("GET", "/ready")
            answer = self._connection.getresponse()
            answer.read()
        except OSError:
            self._connection.close()
            return False
        return answer.status == 200

    def encode(self, texts: list[str]) -> Vectors:
        body = json.dumps({"input": texts})
        self._connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        return [entry["embedding"] for entry in json.load(answer)["data"]]

    def read_cpu_seconds(self) -> float:
        return sum_cpu_seconds(self._process.pid)

    def stop(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.wait()


class PeerProcess:
    def __init__(self, command: list[str], threads: int) -> None:
        environ = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
        )

    def encode(self, texts: list[str]) -> Vectors:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(texts) + "\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))

    def read_cpu_seconds(self) -> float:
        return sum_cpu_seconds(self._process.pid)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def sum_cpu_seconds(pid: int) -> float:
    """Sum the CPU seconds of a process and its children."""
    root = psutil.Process(pid)
    return sum(sum(process.cpu_times()[:2]) for process in (root, *root.children(recursive=True)))


def measure(server: OwnServer | PeerProcess, num_tokens: int, batch: int, seed: int) -> tuple[float, float]:
    """Return texts per second, and per second of CPU time."""
    chooser = random.Random(seed)
    count = 0
    used, began = server.read_cpu_seconds(), time.perf_counter()
    while (passed := time.perf_counter() - began) < SECONDS or not count:
        server.encode(write_texts(chooser, num_tokens, batch))
        count += batch
    return count / passed, count / (server.read_cpu_seconds() - used)


def compare_vectors(encoders: list[Encode]) -> float:
    """Return the smallest cosine similarity between two servers' vectors of a text."""
    texts = [text for length in LENGTHS for text in write_texts(random.Random(0), length, 3)]
    first, *others = [encode(texts) for encode in encoders]
    return min(
        [
            sum(a * b for a, b in zip(one, two, strict=True)) / (math.hypot(*one) * math.hypot(*two))
            for other in others
            for one, two in zip(first, other, strict=True)
        ],
        default=1.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="an interpreter that has sentence-transformers")
    parser.add_argument("--openvino", help="an interpreter that has openvino, torch and transformers")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shape", nargs="+", default=["small"], choices=SHAPES)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    stop_on_signals()
    found = []
    for shape in given.shape:
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work) / "model"
            write_model(folder, shape)
            for dtype in given.dtype:
                found += compare(folder, shape, dtype, given)
    print(json.dumps(found))


def compare(folder: Path, shape: str, dtype: str, given: argparse.Namespace) -> list[dict[str, object]]:
    servers: dict[str, OwnServer | PeerProcess] = {"serve-llm": OwnServer(folder, dtype, given.threads)}
    command = [sys.executable, str(PEERS / "own_encoder.py"), str(folder), "--dtype", dtype]
    servers["LLM"] = PeerProcess([*command, "--threads", str(given.threads)], given.threads)
    if given.peer is not None:
        command = [given.peer, str(PEERS / "sentence_encoder.py"), str(folder), "--dtype", dtype]
        servers["sentence-transformers"] = PeerProcess(command, given.threads)
    if given.openvino is not None:
        command = [given.openvino, str(PEERS / "openvino_encoder.py"), str(folder), "--dtype", dtype]
        servers["openvino"] = PeerProcess([*command, "--threads", str(given.threads)], given.threads)
    found: list[dict[str, object]] = []
    try:
        cosine = compare_vectors([server.encode for server in servers.values()])
        print(f"{shape}, {dtype}, {given.threads} threads: cosine of the vectors at least {cosine:.6f}", flush=True)
        for num_tokens, batch in itertools.product(LENGTHS, BATCHES):
            rates: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
            for turn in range(given.turns):
                for name, server in servers.items():
                    rates[name].append(measure(server, num_tokens, batch, turn))
            medians = {name: [statistics.median(row) for row in zip(*one, strict=True)] for name, one in rates.items()}
            row = "".join(f"   {name} {a:8.1f} /s {b:8.1f} /CPU s" for name, (a, b) in medians.items())
            print(f"{num_tokens:5} tokens, batch {batch:3}{row}", flush=True)
            found.append({"shape": shape, "dtype": dtype, "tokens": num_tokens, "batch": batch, **medians})
    finally:
        for server in servers.values():
            server.stop()
    return found


if __name__ == "__main__":
    main()
