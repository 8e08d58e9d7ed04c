"""Adapters of the embedding and the LM head give PEFT's results, whether or not the two share weights."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_llm.common.errors import AdapterError
from serve_llm.common.types import Adapter, EngineCoreRequest, LoRATarget
from serve_llm.engine.lora.base_copies import check_base_copies
from serve_llm.engine.lora.files import read_adapter
from serve_llm.engine.model.lora_targets import find_lora_targets
from serve_llm.engine.model.registry import read_model
from support.adapters import check_as_peft, make_adapter
from support.engine import generate, greedy, make_engine
from support.matrix import mostly_slow
from support.tiny import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # from PEFT

CASES = [  # family, rank, target modules, changed fields of the model's config and of LoraConfig
    ("llama", 4, ["q_proj", "embed_tokens", "lm_head"], {}, {"use_rslora": True}),
    ("llama", 8, ["embed_tokens", "lm_head", "v_proj"], {"tie_word_embeddings": True}, {}),
    ("gpt2", 16, ["c_attn", "wte", "lm_head"], {}, {}),
    ("gemma2", 8, ["o_proj", "embed_tokens", "lm_head"], {}, {}),
    ("gemma3_text", 4, ["embed_tokens"], {}, {}),
    ("cohere", 128, ["q_proj", "lm_head"], {}, {}),
    ("gpt_neox", 8, ["query_key_value", "embed_in", "lm_head"], {}, {}),
    ("qwen3_moe", 64, ["q_proj", "embed_tokens", "lm_head"], {}, {}),
    ("opt", 8, ["embed_tokens", "lm_head"], {}, {}),
    ("gptj", 8, ["wte", "lm_head"], {}, {}),
    ("llama", 8, ["q_proj", "lm_head"], {}, {"use_dora": True}),
    ("llama", 8, ["lm_head"], {"tie_word_embeddings": True}, {"use_dora": True}),
    ("llama", 4, ["embed_tokens", "q_proj"], {"tie_word_embeddings": True}, {"ensure_weight_tying": True}),
    ("llama", 4, ["lm_head", "q_proj"], {"tie_word_embeddings": True}, {"ensure_weight_tying": True}),
    ("llama", 4, ["embed_tokens"], {}, {"ensure_weight_tying": True}),
    ("gptj", 4, ["wte", "lm_head"], {}, {"use_dora": True}),
    ("bloom", 8, ["query_key_value", "word_embeddings", "lm_head"], {}, {}),
    ("mpt", 8, ["Wqkv", "wte", "lm_head"], {}, {"use_dora": True}),
    ("gemma3_text", 4, ["embed_tokens", "q_proj"], {}, {"use_dora": True}),
]
FAST = (CASES[0], CASES[3], CASES[11], CASES[16])
PROMPTS = [[5, 17, 101, 44, 9, 230, 61], [7] * 19, [300, 2, 45]]
OPTIONS = {"enable_lora": True, "max_lora_rank": 128, "block_size": 8}
NUM_TOKENS = 6


def ask_all(adapters: list[Adapter | None], **sampling: object) -> list[EngineCoreRequest]:
    pairs = [(prompt, adapter) for prompt in PROMPTS for adapter in adapters]
    return [
        msgspec.structs.replace(greedy(number, prompt, NUM_TOKENS, **sampling), adapter=adapter)
        for number, (prompt, adapter) in enumerate(pairs)
    ]


@pytest.mark.parametrize(("family", "rank", "modules", "model", "config"), mostly_slow(CASES, FAST))
def test_as_peft(
    family: str, rank: int, modules: list[str], model: dict[str, object], config: dict[str, object], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, family, **model)
    adapters: list[Adapter | None] = [None]
    for number in range(2):
        directory = tmp_path / f"adapter{number}"
        adapters.append(
            make_adapter(checkpoint, directory, family, seed=number, r=rank, target_modules=modules, **config)
        )
    requests = ask_all(adapters)
    results = generate(make_engine(checkpoint, **OPTIONS), requests)
    check_as_peft(checkpoint, requests, results)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outer")


@lru_cache(maxsize=1)
def llama(root: Path) -> tuple[Path, list[Adapter | None]]:
    """Return a checkpoint; no adapter, one of inner layers, one of the head, one of the embedding and the head, and the
    latter with DoRA."""
    checkpoint = root / "llama"
    make_checkpoint(checkpoint, "llama")
    outer = ["embed_tokens", "lm_head", "down_proj"]
    adapters = [
        make_adapter(
            checkpoint, root / f"adapter{number}", seed=number, r=number + 2, target_modules=names, use_dora=number == 3
        )
        for number, names in enumerate([["q_proj"], ["lm_head"], outer, outer])
    ]
    return checkpoint, [None, *adapters]


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], ["bfloat16"]))
def test_same_bits_alone_and_in_a_crowd(root: Path, dtype: str) -> None:
    checkpoint, adapters = llama(root)
    requests = ask_all(adapters, temperature=1.0, logprobs=2, prompt_logprobs=1)
    requests += [msgspec.structs.replace(request, id=request.id + len(requests)) for request in ask_all(adapters)]
    crowd = generate(make_engine(checkpoint, dtype=dtype, **OPTIONS), requests, list(range(len(requests))))
    plain = make_engine(checkpoint, dtype=dtype, block_size=8)
    for request in requests:
        engine = plain if request.adapter is None else make_engine(checkpoint, dtype=dtype, **OPTIONS)
        (alone,) = generate(engine, [request]).values()
        assert alone.token_ids == crowd[request.id].token_ids
        assert alone.logprobs == crowd[request.id].logprobs
        assert alone.prompt_logprobs == crowd[request.id].prompt_logprobs


@pytest.mark.parametrize(
    ("tensor", "pipeline", "quantization"),
    mostly_slow(
        [(2, 1, "auto"), (3, 1, "auto"), (1, 2, "auto"), (2, 2, "auto"), (1, 2, "int8"), (1, 2, "int4-g32")],
        [(2, 2, "auto"), (1, 2, "int8")],
    ),
)
def test_several_ranks(tensor: int, pipeline: int, quantization: str, root: Path) -> None:
    """With --quantization, each tensor-parallel rank has scales of its own, so only pipeline parallelism gives the same
    bits."""
    checkpoint, adapters = llama(root)
    requests = ask_all(adapters)
    options = OPTIONS | {"quantization": quantization}
    one = generate(make_engine(checkpoint, **options), requests)
    several = generate(make_engine(checkpoint, tensor=tensor, pipeline=pipeline, **options), requests)
    assert {number: result.token_ids for number, result in several.items()} == {
        number: result.token_ids for number, result in one.items()
    }


def find_targets(checkpoint: Path) -> dict[str, LoRATarget]:
    return find_lora_targets(*read_model(json.loads((checkpoint / "config.json").read_text())))


@pytest.mark.parametrize("is_tied", [False, True])
def test_copies_of_the_base_must_be_equal(is_tied: bool, tmp_path: Path) -> None:
    """PEFT stores copies of the base weights with adapters of the embedding and the head."""
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, "llama", tie_word_embeddings=is_tied)
    make_adapter(checkpoint, tmp_path / "adapter", target_modules=["embed_tokens", "lm_head"])
    targets = find_targets(checkpoint)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = "base_model.model.lm_head.base_layer.weight"
    assert name in tensors
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        save_file(tensors | {name: tensors[name].to(dtype)}, weights)
        check_base_copies(read_adapter(tmp_path / "adapter", targets, 16).copies, checkpoint)
    save_file(tensors | {name: tensors[name] + 0.01}, weights)
    with pytest.raises(AdapterError, match=r"lm_head\.base_layer\.weight is not the base model's"):
        check_base_copies(read_adapter(tmp_path / "adapter", targets, 16).copies, checkpoint)
    save_file(tensors | {name: tensors[name][1:].contiguous()}, weights)
    with pytest.raises(AdapterError, match=r"lm_head\.base_layer\.weight has shape \[\d+, \d+\], but must have"):
        read_adapter(tmp_path / "adapter", targets, 16)


def test_half_of_a_tied_adapter_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, "llama", tie_word_embeddings=True)
    make_adapter(checkpoint, tmp_path / "adapter", target_modules=["embed_tokens"], ensure_weight_tying=True)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: one for name, one in load_file(weights).items() if "lm_head.lora" not in name}, weights)
    with pytest.raises(AdapterError, match=r"has an adapter of model\.embed_tokens only"):
        read_adapter(tmp_path / "adapter", find_targets(checkpoint), 16)
