"""Resources that an engine takes from its host, and its work before it is ready."""

from __future__ import annotations

import contextlib
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from llguidance import LLTokenizer

from serve_llm.common.errors import OptionError
from serve_llm.common.hub import resolve_model
from serve_llm.common.messages import Failed, Start, decode_from_engine
from serve_llm.common.options.sources import make_options
from serve_llm.engine import startup
from serve_llm.engine.__main__ import LINGER_MS, ZmqChannel
from serve_llm.engine.config import Config
from serve_llm.engine.distributed.executor import Executor
from serve_llm.engine.structured_output import builder
from serve_llm.engine.worker import worker
from support.engine import make_engine
from support.quantised import quantise_checkpoint


@pytest.mark.parametrize(("num_engines", "threads"), [(1, 8), (2, 4), (3, 2), (100, 1)])
def test_engines_of_one_host_share_its_threads(monkeypatch: pytest.MonkeyPatch, num_engines: int, threads: int) -> None:
    found: list[int] = []
    monkeypatch.setattr(worker, "count_usable_cores", lambda: 8)  # a quota, on a machine with more cores
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    directory = Path(resolve_model("demo"))
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    make_engine(directory, data_parallel_size=num_engines)
    make_engine(directory, data_parallel_size=num_engines, cpu_threads=3)
    monkeypatch.delenv("OMP_NUM_THREADS")
    make_engine(directory, data_parallel_size=num_engines)
    assert found == [64, 3, threads]


def test_the_tokenizer_of_grammars_is_loaded_beside_the_model_and_before_the_engine_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_loading, is_built = threading.Event(), threading.Event()
    build_executor, load_tokenizer = startup.build_executor, builder.load_tokenizer
    loaded: list[LLTokenizer] = []

    def build(*arguments: Any) -> Executor:
        assert is_loading.wait(60), "the tokenizer is loaded only after the model"
        executor = build_executor(*arguments)
        is_built.set()
        return executor

    def load(config: Config) -> LLTokenizer:
        is_loading.set()
        assert is_built.wait(60), "the model is loaded only after the tokenizer"
        loaded.append(load_tokenizer(config))
        return loaded[0]

    monkeypatch.setattr(startup, "build_executor", build)
    monkeypatch.setattr(builder, "load_tokenizer", load)
    start = Start(make_options("demo", kv_cache_memory="16MiB"), str(resolve_model("demo")))
    with contextlib.ExitStack() as resources:
        core, _ = startup.start_engine(start, resources, lambda request_ids: None)
        assert len(loaded) == 1
        assert core.grammars._compiler._tokenizer is loaded[0]


@pytest.mark.parametrize(("quantization", "stored"), [("compressed-tensors", True), ("awq", True), ("awq", False)])
def test_the_format_of_the_checkpoint_may_be_named(
    quantization: str, stored: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = Path(str(resolve_model("demo")))
    if stored:
        quantise_checkpoint(directory, tmp_path / "int8")
        shutil.copy(directory / "tokenizer.json", tmp_path / "int8")
        directory = tmp_path / "int8"
    options = make_options("demo", quantization=quantization, kv_cache_memory="16MiB", device="cpu")
    with contextlib.ExitStack() as resources:
        if quantization == "awq":
            found = "is stored as compressed-tensors" if stored else "is not quantised"
            with pytest.raises(OptionError, match=f"^--quantization: awq .* but this one {found}; omit the option"):
                startup.start_engine(Start(options, str(directory)), resources, lambda request_ids: None)
            return
        startup.start_engine(Start(options, str(directory)), resources, lambda request_ids: None)
        assert "--quantization: the checkpoint is stored as compressed-tensors" in capfd.readouterr().err


def test_a_pooling_that_no_route_would_use_is_refused() -> None:
    directory = Path(resolve_model("demo"))
    with pytest.raises(OptionError, match=r"^--pooling-type: the model makes no embeddings; add --convert embed"):
        make_engine(directory, pooling_type="last")
    make_engine(directory, pooling_type="last", convert="embed")


def test_an_ending_engine_waits_until_its_last_message_is_delivered(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine"
    channel = ZmqChannel(address)
    channel.send(Failed("RankFailed", "rank 2 died"))
    closing = threading.Thread(target=channel.close)
    closing.start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as server:
        assert closing.is_alive()
        server.bind(address)
        assert server.poll(LINGER_MS)
        assert decode_from_engine(server.recv()) == Failed("RankFailed", "rank 2 died")
        closing.join()
