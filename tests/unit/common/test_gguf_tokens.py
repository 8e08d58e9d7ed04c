"""Published GGUF files state the types and ends of tokens in several ways, and defaults for sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from serve_llm.common.errors import ModelError
from serve_llm.common.gguf.file import GGUFFile, StoredTensor
from serve_llm.common.gguf.tokenizer import Vocabulary, build_tokenizer, find_eos_ids
from serve_llm.common.hub import read_json, resolve_model

LETTERS = [*"abcdefghijklmnopqrstuvwxyz\u2581<>_|"]


def vocabulary(tokens: list[str], types: list[int], **more: Any) -> Vocabulary:
    """A sentencepiece vocabulary of letters and these tokens."""
    entries = {
        "general.architecture": "phi3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*LETTERS, *tokens],
        "tokenizer.ggml.token_type": [*[1] * len(LETTERS), *types],
        "tokenizer.ggml.scores": [0.0] * (len(LETTERS) + len(tokens)),
        "tokenizer.ggml.add_bos_token": False,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
    return Vocabulary(GGUFFile(Path("a.gguf"), entries, dict[str, StoredTensor]()))


@pytest.mark.parametrize(
    ("end", "kind"),
    [("<|end|>", 4), ("<end_of_turn>", 1), ("<|im_end|>", 1), ("<|eot_id|>", 5), ("<|end_of_text|>", 3)],
)
def test_the_end_of_a_turn_is_a_control_token_whatever_its_type(end: str, kind: int) -> None:
    """Files of Phi-3 type it as defined by the user, and fine-tuned Gemma 3 as text."""
    file = vocabulary([end, "</s>"], [kind, 3], eos_token_id=len(LETTERS) + 1)
    assert find_eos_ids(file) == [len(LETTERS) + 1, len(LETTERS)]
    tokenizer = Tokenizer.from_str(build_tokenizer(file))
    ids = tokenizer.encode(f"hi{end}").ids
    assert ids[-1] == len(LETTERS) and len(LETTERS) not in ids[:-1]
    assert tokenizer.decode(ids) == "hi"


def test_the_beginning_of_a_turn() -> None:
    tokenizer = Tokenizer.from_str(build_tokenizer(vocabulary(["<start_of_turn>"], [1])))
    assert tokenizer.encode("<start_of_turn>a").ids[0] == len(LETTERS)


@pytest.mark.parametrize("end", ["<eos>", "[EOT]", "[EOS]"])
def test_other_names_end_a_text_only_as_control_tokens(end: str) -> None:
    assert find_eos_ids(vocabulary([end], [3])) == [len(LETTERS)]
    assert find_eos_ids(vocabulary([end], [1])) == []


def test_lists_of_ends() -> None:
    """As Ollama writes them."""
    assert find_eos_ids(vocabulary([], [], eos_token_id=1, eos_token_ids=[1, 7])) == [1, 7]
    for value, message in (([99], "must be an id below"), (7, "must be a list of ids")):
        with pytest.raises(ModelError, match=rf"a\.gguf: metadata key tokenizer\.ggml\.eos_token_ids {message}"):
            find_eos_ids(vocabulary([], [], eos_token_ids=value))


def test_sampling_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that exist here are translated; samplers that do not are left out."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen2")
    for key, value in {
        "context_length": 64,
        "embedding_length": 64,
        "block_count": 1,
        "feed_forward_length": 96,
    }.items():
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_uint32("qwen2.attention.head_count", 4)
    writer.add_uint32("general.sampling.top_k", 20)
    for key, number in {"temp": 0.6, "top_p": 0.95, "penalty_repeat": 1.05, "mirostat_tau": 5.0}.items():
        writer.add_float32(f"general.sampling.{key}", number)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_json(resolve_model(str(tmp_path / "a.gguf")) / "generation_config.json")
    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
