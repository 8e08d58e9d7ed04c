"""Adapters with real processes: the offline class, ranks, engines that die, and routes that load files."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import urllib.request
from pathlib import Path

import pytest

from serve_llm import LLM, LoRARequest, SamplingParams
from serve_llm.common.errors import AdapterError
from serve_llm.common.hub import resolve_model
from serve_llm.server.http.errors import InvalidRequest
from support.adapters import make_adapter
from support.daemon import Daemon
from support.speculation import NGRAM
from support.streams import Streams, chats, mixed
from support.tools import write_files

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # from PEFT
SMALL = ("--kv-cache-memory", "64MiB", "--max-restarts", "100", "--enable-lora")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["class Stack:\n    def __init__(self):\n", "def main():\n", "import os\n"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the directories of two adapters of the demo model."""
    root = tmp_path_factory.mktemp("adapters")
    names = ["first", "second"]
    return [make_adapter(resolve_model("demo"), root / name, seed=len(name), scale=0.1).directory for name in names]


@pytest.mark.slow
def test_offline_on_one_rank_and_on_two(adapters: list[str]) -> None:
    first, second = (LoRARequest(Path(directory).name, directory) for directory in adapters)
    found = []
    for ranks in (1, 2):
        with LLM("demo", enable_lora=True, kv_cache_memory="64MiB", tensor_parallel_size=ranks, dtype="float32") as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=[None, first, second])
            again = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora=second.lora_name)
            base = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            with pytest.raises(AdapterError, match="is not a directory"):
                llm.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("third", "/nowhere"))
            with pytest.raises(InvalidRequest, match=r"no adapter fourth; load it with LoRARequest\('fourth', path\)"):
                llm.generate(PROMPTS[0], GREEDY, lora_request="fourth")
            with pytest.raises(InvalidRequest, match="2 adapters for 3 prompts"):
                llm.generate(PROMPTS, GREEDY, lora_request=[first, second])
        texts = [output.outputs[0].text for output in outputs]
        assert texts[0] == base[0].outputs[0].text and texts[2] == again[2].outputs[0].text
        assert texts[1] != base[1].outputs[0].text and texts[2] != base[2].outputs[0].text
        found.append(texts)
    assert found[0] == found[1]


@pytest.mark.slow
def test_vectors_offline(adapters: list[str]) -> None:
    adapter = LoRARequest("first", 1, adapters[0])
    with LLM("demo", enable_lora=True, runner="generate", convert="embed", kv_cache_memory="64MiB") as llm:
        base, first = llm.embed(PROMPTS[:1] * 2, use_tqdm=False, lora=[None, adapter])
        again = llm.embed(PROMPTS[0], use_tqdm=False, lora_request="first")[0]
        assert base.outputs.embedding != first.outputs.embedding == again.outputs.embedding
        assert llm.embed(PROMPTS[0], use_tqdm=False)[0].outputs.embedding == base.outputs.embedding
        scores = llm.score(PROMPTS[0], PROMPTS[1:], use_tqdm=False, lora=[None, "first"])
        plain = llm.score(PROMPTS[0], PROMPTS[1:], use_tqdm=False)
        assert scores[0].outputs.score == plain[0].outputs.score
        assert scores[1].outputs.score != plain[1].outputs.score
        messages = [{"role": "user", "content": PROMPTS[0]}]
        chats = [llm.chat(messages, GREEDY, use_tqdm=False, lora=one)[0].outputs[0].text for one in (None, adapter)]
        assert chats[0] != chats[1]


def with_models(names: list[str | None]) -> list[dict[str, object]]:
    """Return requests of all kinds, which use the models in turn."""
    bodies = mixed(12)
    return [body | {"model": names[number % len(names)]} for number, body in enumerate(bodies)]


@pytest.mark.slow
@pytest.mark.pairs("LoRA + replay")
def test_streams_with_adapters_survive_their_engine(adapters: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "second"
    shutil.copytree(adapters[1], directory)
    modules = ("--lora-modules", f"a={adapters[0]}", f"b={directory}", "--max-loras", "1")
    with Daemon("demo", *modules, *SMALL) as daemon:
        bodies = with_models([None, "a", "b"])
        undisturbed = Streams(daemon.wait_until_serving(), bodies).finish()
        assert undisturbed.errors == []
        streams = Streams(daemon.url, bodies)
        streams.wait_for(120)
        os.kill(daemon.engine_pid(), signal.SIGKILL)
        assert streams.finish() == undisturbed
        daemon.wait_until_logged("it is replaced")
        shutil.copytree(adapters[0], directory, dirs_exist_ok=True)
        changed = Streams(daemon.url, [{"model": "b", "prompt": "x", "stream": False}]).finish()
        assert changed.errors == [500]
        (message,) = changed.messages
        assert re.search("the files of the adapter b have changed since it was loaded", json.dumps(message))


@pytest.mark.pairs("LoRA + tools", "LoRA + DP", "tools + int8", "tools + logprobs", "int8 + DP", "int8 + replay")
@pytest.mark.slow
def test_two_engines_with_drafts_one_of_which_is_killed(adapters: list[str], tmp_path: Path) -> None:
    """Tool calls, grammars, choices and logprobs, each with the base model or an adapter."""
    names: list[str | None] = [None, "a", "b"]
    talks = [body | {"model": names[number % 3], "logprobs": True} for number, body in enumerate(chats(4))]
    bodies = [*with_models(names), *talks]
    files = [word for pair in write_files(tmp_path).items() for word in pair]
    modules = ("--lora-modules", f"a={adapters[0]}", f"b={adapters[1]}")
    with Daemon(
        "demo",
        *SMALL,
        *modules,
        *files,
        "--speculative-config",
        json.dumps(NGRAM),
        "--quantization",
        "int8",
        "-dp",
        "2",
    ) as daemon:
        undisturbed = Streams(daemon.wait_until_serving(), bodies).finish()
        assert undisturbed.errors == []
        streams = Streams(daemon.url, bodies)
        streams.wait_for(120)
        os.kill(daemon.engine_pids()[0], signal.SIGKILL)
        daemon.wait_until_logged("it is replaced")
        assert streams.finish() == undisturbed


@pytest.mark.slow
def test_a_bad_adapter_ends_the_start(tmp_path: Path) -> None:
    with Daemon("demo", *SMALL, "--lora-modules", f"a={tmp_path}") as daemon:
        assert daemon.wait(120) == 3
        assert "the adapter a cannot be served: " in daemon.log[-1]


def test_loading_while_the_server_runs(adapters: list[str]) -> None:
    with Daemon("demo", *SMALL, environ={"SERVE_LLM_API_KEY": "admin:key"}) as daemon:
        url = daemon.wait_until_serving()

        def post(path: str, body: dict[str, object]) -> dict[str, object]:
            headers = {"authorization": "Bearer admin:key"}
            request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return dict(json.load(answer))

        body: dict[str, object] = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
        base = post("/v1/completions", body)
        post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": adapters[0]})
        adapted = post("/v1/completions", body | {"model": "sql"})
        assert adapted["model"] == "sql" and adapted["choices"] != base["choices"]
        post("/v1/unload_lora_adapter", {"lora_name": "sql"})
