"""Features together with ranks on several hosts: same answers as those ranks on one host."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from serve_llm.common.hub import resolve_model
from support.adapters import make_adapter
from support.daemon import Daemon
from support.eagle import Served, build_head, write_head
from support.grammars import VOCAB_SIZE, demo
from support.nodes import LIMIT, SMALL, Hosts
from support.packed_floats import make_packed
from support.tiny import make_checkpoint
from support.tools import write_files

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),  # from PEFT
]
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, item):\n"
GREEDY = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {
    "messages": [{"role": "user", "content": "Add."}],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "max_tokens": 24,
    "temperature": 0,
}


def post(url: str, path: str, body: object) -> object:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        found = json.load(answer)
    if path == "/v1/embeddings":
        return found["data"][0]["embedding"]
    return [choice.get("text") or choice["message"] for choice in found["choices"]]


def drop_ids(answer: object) -> object:
    """Drop the ids of calls, which are random."""
    if isinstance(answer, list):
        return [drop_ids(item) for item in answer]
    if isinstance(answer, dict):
        return {key: drop_ids(value) for key, value in answer.items() if key != "id"}
    return answer


def check_as_on_one_host(arguments: tuple[str, ...], asked: list[tuple[str, dict[str, object]]]) -> None:
    with Daemon(*arguments) as daemon:
        url = daemon.wait_until_serving()
        expected = [drop_ids(post(url, path, body)) for path, body in asked]
    hosts = Hosts()
    with hosts.node(1), hosts.node(0, *arguments) as master:
        url = master.wait_until_serving()
        found = [drop_ids(post(url, path, body)) for path, body in asked]
    for (path, _), one, other in zip(asked, found, expected, strict=True):
        assert one == (pytest.approx(other, abs=1e-4) if path == "/v1/embeddings" else other)


@pytest.mark.pairs(
    "speculation + several hosts",
    "LoRA + several hosts",
    "grammar + several hosts",
    "tools + several hosts",
    "int8 + several hosts",
    "prefix cache + several hosts",
    "logprobs + several hosts",
    "n + several hosts",
    "TP + several hosts",
    "PP + several hosts",
    "embeddings + several hosts",
    "KV offload + several hosts",
)
def test_all_kinds_of_requests(tmp_path: Path) -> None:
    adapter = make_adapter(resolve_model("demo"), tmp_path / "adapter", scale=0.1)
    arguments = ("demo", *SMALL, "-tp", "2", "-pp", "2", "--quantization", "int8", "--speculative-config", "ngram")
    arguments += ("--enable-lora", "--lora-modules", f"a={adapter.directory}", "--kv-offload-memory", "16MiB")
    arguments += ("--runner", "generate", "--convert", "embed")
    arguments += tuple(word for pair in write_files(tmp_path).items() for word in pair)
    asked: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", GREEDY),
        ("/v1/completions", GREEDY | {"model": "a"}),
        ("/v1/completions", GREEDY | {"temperature": 1, "seed": 3, "n": 3, "logprobs": 1}),
        ("/v1/completions", GREEDY | {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}),
        ("/v1/chat/completions", CALL),
        ("/v1/embeddings", {"input": PROMPT}),
    ]
    check_as_on_one_host(arguments, asked)


@pytest.mark.pairs("fp8 + several hosts", "DP + several hosts", "EP + several hosts")
def test_engines_that_share_experts(tmp_path: Path) -> None:
    make_packed(tmp_path, "qwen3_moe", "fp8-block", vocab_size=VOCAB_SIZE)
    arguments = (str(tmp_path / "packed"), *SMALL[:2], *SMALL[4:], "--tokenizer", str(demo()), "-dp", "2")
    asked = [("/v1/completions", GREEDY | {"max_tokens": 8, "seed": number}) for number in range(3)]
    check_as_on_one_host((*arguments, "--enable-expert-parallel"), asked)


@pytest.mark.pairs("int4 + several hosts", "draft model + several hosts")
def test_a_draft_model() -> None:
    arguments = ("demo", *SMALL, "-pp", "2", "--quantization", "int4-g32", "--speculative-config", "demo")
    check_as_on_one_host(arguments, [("/v1/completions", GREEDY)])


@pytest.mark.slow
def test_a_draft_model_on_ranks_of_two_hosts() -> None:
    split = json.dumps({"model": "demo", "draft_tensor_parallel_size": 2})
    arguments = ("demo", *SMALL, "-tp", "2", "--speculative-config", split)
    check_as_on_one_host(arguments, [("/v1/completions", GREEDY)])


@pytest.mark.pairs("draft head + several hosts")
def test_a_draft_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "served", "llama", vocab_size=VOCAB_SIZE)
    head = write_head(build_head(Served(tmp_path / "served"), 97), tmp_path / "head")
    arguments = (str(tmp_path / "served"), *SMALL[:2], *SMALL[4:], "--tokenizer", str(demo()), "-pp", "2")
    config = json.dumps({"method": "eagle3", "model": str(head)})
    check_as_on_one_host((*arguments, "--speculative-config", config), [("/v1/completions", GREEDY)])


@pytest.mark.pairs("several hosts + linear attention")
def test_linear_attention(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_next", vocab_size=VOCAB_SIZE)
    arguments = (str(tmp_path), *SMALL[:2], *SMALL[4:], "--tokenizer", str(demo()), "-pp", "2")
    check_as_on_one_host(arguments, [("/v1/completions", GREEDY)])
