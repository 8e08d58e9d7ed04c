"""`serve-llm model.gguf`: one file is a whole model, with its tokenizer and chat template; and bad quantised files."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI

from serve_llm import LLM, SamplingParams
from support.daemon import Daemon
from support.gguf_files import make_gguf
from support.packed import Packing, make_packed
from support.quantised import edit_config
from support.tiny import make_tokenizer

SIZES = ("--kv-cache-memory", "32MiB", "--dtype", "float32")
PROMPT = "The quick brown fox"


@pytest.mark.slow
def test_a_file_is_served(tmp_path: Path) -> None:
    make_gguf(tmp_path, "qwen3", "Q4_K")
    file = str(tmp_path / "model.gguf")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with LLM(str(tmp_path / "plain"), kv_cache_memory="32MiB", dtype="float32") as llm:
        (expected,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    with Daemon(file, *SIZES, environ=environ) as daemon:
        client = OpenAI(base_url=f"{daemon.wait_until_serving()}/v1", api_key="none")
        found = client.completions.create(
            model=file, prompt=PROMPT, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        assert found.choices[0].text == expected.outputs[0].text
        message = [{"role": "user", "content": "Hi"}]
        chat = client.chat.completions.create(model=file, messages=message, max_tokens=4)  # type: ignore[arg-type]
        assert chat.usage is not None and chat.usage.prompt_tokens > 4


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    make_gguf(tmp_path, "qwen3", "Q4_K")
    path = tmp_path / "model.gguf"
    path.write_bytes(path.read_bytes()[:-1000])
    with Daemon(str(path), *SIZES, environ={"XDG_CACHE_HOME": str(tmp_path / "cache")}) as daemon:
        assert daemon.wait(60) == 3
        assert any("tensor blk.1" in line and "cut short" in line for line in daemon.log)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"group_size": 64},
            "q_proj.qzeros has shape [4, 8], but config.json asks for [1, 8]",
            marks=pytest.mark.slow,
        ),
        pytest.param({"zero_point": False}, "q_proj.qzeros has zero point ", marks=pytest.mark.slow),
        ({"version": "gemv_fast"}, "quantization_config: version 'gemv_fast' is not supported"),
    ],
)
def test_a_packed_checkpoint_that_does_not_fit(change: dict[str, object], message: str, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "packed" / "tokenizer", make_packed(tmp_path, "llama", Packing("awq")))
    edit_config(tmp_path / "packed", lambda config: config.update(change))
    tokenizer = ("--tokenizer", str(tmp_path / "packed" / "tokenizer"))
    with Daemon(str(tmp_path / "packed"), *SIZES, *tokenizer) as daemon:
        assert daemon.wait(60) == 3
        assert any(message in line for line in daemon.log)
