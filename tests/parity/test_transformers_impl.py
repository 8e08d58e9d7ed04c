"""Models in transformers' own code with our attention, cache and sampler: what `test_engine` does not cover."""

from __future__ import annotations

import json
import logging
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    OlmoConfig,
    OlmoForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
)

from serve_llm import LLM, SamplingParams
from serve_llm.common.errors import ModelError, OptionError, UnsupportedModel
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine import startup
from serve_llm.engine.hf_backend.decoder import PackedLinear
from serve_llm.engine.hf_backend.probe import ProbeResult, probe_model
from serve_llm.engine.loop import EngineCore
from support.engine import generate, greedy, make_engine
from support.matrix import mostly_slow
from support.reference import reference_greedy, reference_logprobs
from support.speculation import NGRAM, assert_drafted, draft_from
from support.tiny import make_checkpoint, make_tokenizer


def engine_of(directory: Path, **options: object) -> EngineCore:
    return make_engine(directory, block_size=8, model_impl="transformers", **options)


def random_ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(331) for _ in range(count)]


@pytest.mark.parametrize("family", ["phi", "gemma2", "gpt_oss"])  # softcap and sinks, which none of OTHERS has
def test_prompt_logprobs(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, intermediate_size=36)  # transformers' experts need a multiple of 4
    ids = random_ids(90)
    result = generate(engine_of(tmp_path, max_num_batched_tokens=17), [greedy(0, ids, 2, prompt_logprobs=0)])[0]
    expected = reference_logprobs(tmp_path, ids)[torch.arange(89), torch.tensor(ids[1:])]
    assert result.prompt_logprobs is not None
    found = torch.tensor([entry.logprob for entry in result.prompt_logprobs])
    assert (found - expected).abs().max() < 1e-3


def test_windows_give_blocks_back(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "exaone4")
    engine = engine_of(tmp_path, max_num_batched_tokens=16)
    block_sizes = {group.window: group.block_size for group in engine.kv_cache_config.groups}
    assert block_sizes.keys() == {21, None}
    prompt = random_ids(200)
    ids, logprobs = reference_greedy(tmp_path, prompt, 20)
    result = generate(engine, [greedy(0, prompt, 20, logprobs=0)])[0]
    assert result.token_ids == ids
    assert all(abs(a.logprob - b) < 1e-3 for a, b in zip(result.logprobs, logprobs, strict=True))
    without_window = sum(-(-220 // block_size) for block_size in block_sizes.values())
    assert engine.kv_cache_config.blocks_per_request(220, 16) < 0.7 * without_window


@pytest.mark.parametrize(
    ("family", "dtype"),
    mostly_slow([("exaone4", "bfloat16"), ("phi", "float32"), ("olmo", "bfloat16")], [("olmo", "bfloat16")]),
)
def test_a_rows_bits_do_not_depend_on_its_company(family: str, dtype: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, dtype=dtype)
    sampling = Sampling(max_tokens=9, seed=5, temperature=1.0, logprobs=2)
    wanted = EngineCoreRequest(id=0, prompt_ids=random_ids(29), sampling=sampling)
    alone = generate(engine_of(tmp_path), [wanted])[0]
    rng = random.Random(3)
    for budget in (64, 7):
        engine = engine_of(tmp_path, max_num_batched_tokens=budget)
        for _ in range(3):
            others = [greedy(n, random_ids(rng.randrange(1, 30), n), rng.randrange(1, 9)) for n in range(1, 6)]
            result = generate(engine, [wanted, *others], [rng.randrange(6) for _ in range(6)])[0]
            assert result.token_ids == alone.token_ids
            assert result.logprobs == alone.logprobs  # to the last bit


def test_an_int8_cache_is_close(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "exaone4")
    ids = random_ids(60)
    exact, small = (
        generate(engine_of(tmp_path, kv_cache_dtype=dtype), [greedy(0, ids, 1, prompt_logprobs=0)])[0].prompt_logprobs
        for dtype in ("auto", "int8")
    )
    assert exact is not None and small is not None
    off = [abs(a.logprob - b.logprob) for a, b in zip(exact, small, strict=True)]
    assert 0 < sum(off) / len(off) < 0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_drafts_change_no_bit(dtype: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "exaone4", dtype=dtype, intermediate_size=96)
    requests = [
        EngineCoreRequest(id=n, prompt_ids=random_ids(9 * n + 1), sampling=Sampling(max_tokens=12, seed=5, logprobs=1))
        for n in range(4)
    ]
    expected = generate(engine_of(tmp_path), requests)
    engine = draft_from(engine_of(tmp_path, speculative_config=NGRAM), requests, expected)
    for number, result in generate(engine, requests).items():
        assert result.token_ids == expected[number].token_ids
        assert result.logprobs == expected[number].logprobs
    assert_drafted(engine)


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "olmo")
    (tmp_path / "model.safetensors").unlink()
    first, again, other = (
        generate(engine_of(tmp_path, load_format="dummy", seed=seed), [greedy(0, [1, 2, 3], 3, logprobs=3)])[0].logprobs
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_the_log_says_that_it_is_slow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "olmo")
    with caplog.at_level(logging.INFO):
        engine_of(tmp_path)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert startup.SLOW % "OlmoForCausalLM" in lines
    assert "Weights: " in caplog.text


@pytest.mark.slow
def test_offline_with_a_tokenizer(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, make_checkpoint(tmp_path, "phi"))
    with LLM(str(tmp_path), model_impl="transformers", kv_cache_memory="16MiB", device="cpu") as llm:
        (output,) = llm.generate("The quick brown fox", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    ids, _ = reference_greedy(tmp_path, output.prompt_token_ids, 8)
    assert list(output.outputs[0].token_ids) == ids


def written(directory: Path, **config: object) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM cannot be served by transformers' own code: it keeps a state other than keys and values, "
            "which our KV cache does not hold",
        ),
        (
            {"model_type": "biogpt", "architectures": ["BioGptForCausalLM"]},
            "BioGptForCausalLM cannot be served by transformers' own code: its attention is its own and cannot be "
            "replaced by ours",
        ),
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
            "T5ForConditionalGeneration cannot be served by transformers' own code: transformers has no decoder-only "
            "language model for it",
        ),
        (
            {"model_type": "bart", "architectures": ["BartForCausalLM"]},
            "BartForCausalLM cannot be served by transformers' own code: transformers has no decoder-only language "
            "model for it",
        ),
        (
            {
                "model_type": "olmo",
                "architectures": ["OlmoForCausalLM"],
                "quantization_config": {"quant_method": "awq"},
            },
            "OlmoForCausalLM cannot be served by transformers' own code: its checkpoint is quantised",
        ),
    ],
)
def test_refused_before_a_weight_is_read(config: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as raised:
        engine_of(written(tmp_path, **config))
    assert str(raised.value) == message


def test_code_that_comes_with_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    auto = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    with pytest.raises(UnsupportedModel, match=r"^transformers [\d.]+ cannot read .*config\.json: "):
        engine_of(written(tmp_path, model_type="own", architectures=["Own"], auto_map=auto))


SMALL = {
    "vocab_size": 331,
    "hidden_size": 60,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
}


def bidirectional() -> PreTrainedModel:
    return BertLMHeadModel._from_config(BertConfig(**SMALL), attn_implementation="serve_llm_trial")


def convolution() -> PreTrainedModel:
    config = Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
    return Lfm2ForCausalLM._from_config(config, attn_implementation="serve_llm_trial")


def chunked_attention() -> PreTrainedModel:
    config = Llama4TextConfig(**SMALL, intermediate_size_mlp=64, head_dim=10, attention_chunk_size=32, moe_layers=[])
    return Llama4ForCausalLM._from_config(config, attn_implementation="serve_llm_trial")


def shifted_positions() -> PreTrainedModel:  # shifted to the position after the padding
    config = RobertaConfig(**SMALL, is_decoder=True, pad_token_id=1)
    return RobertaForCausalLM._from_config(config, attn_implementation="serve_llm_trial")


def ignored_positions() -> PreTrainedModel:
    model = OlmoForCausalLM._from_config(OlmoConfig(**SMALL), attn_implementation="serve_llm_trial")
    own = {"position_ids": torch.arange(8)[None]}
    model.model.rotary_emb.register_forward_pre_hook(lambda module, args, kwargs: (args, own), with_kwargs=True)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)  # as in make_checkpoint, so that attention matters
    return model


MIXES = (
    "something besides attention carries from token to token (a convolution or recurrent state, which our KV cache "
    "does not hold), or it does not use the positions that it is given"
)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (bidirectional, "its attention mask is neither causal nor a sliding window"),
        (chunked_attention, "its attention mask is neither causal nor a sliding window"),
        (convolution, MIXES),
        (ignored_positions, MIXES),
        (shifted_positions, "it does not count a sequence's positions as 0, 1, 2, ..."),
    ],
)
def test_what_a_trial_refuses(make: Callable[[], PreTrainedModel], why: str) -> None:
    torch.manual_seed(0)
    model = make().eval()
    with pytest.raises(UnsupportedModel) as raised:
        probe_model(model, 331, 256)
    assert str(raised.value) == f"{type(model).__name__} cannot be served by transformers' own code: {why}"


@pytest.mark.parametrize(
    ("change", "weight"),
    [
        ({"num_hidden_layers": 2}, "model.layers.1.mlp.down_proj.weight"),
        ({"vocab_size": 330}, "lm_head.weight"),
    ],
)
def test_a_weight_that_is_missing_is_named(change: dict[str, int], weight: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "olmo", num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ModelError) as raised:
        engine_of(written(tmp_path, **(config | change)))
    assert str(raised.value) == f"{tmp_path}: the checkpoint lacks {weight}, or has it in another shape"


def test_a_checkpoint_that_cannot_be_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "olmo")
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match=r"^transformers cannot load .*: "):
        engine_of(tmp_path)


def test_longrope_is_served_where_its_factors_do_not_change(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [2.0] * 5,
        "short_factor": [1.0] * 5,
        "original_max_position_embeddings": 64,
    }
    make_checkpoint(tmp_path, "olmo", rope_parameters=rope)
    with pytest.raises(OptionError, match=r"^--max-model-len: longrope .* give at most 64$"):
        engine_of(tmp_path)
    prompt = random_ids(40)
    result = generate(engine_of(tmp_path, max_model_len=64), [greedy(0, prompt, 8)])[0]
    assert result.token_ids == reference_greedy(tmp_path, prompt, 8)[0]


def test_weights_go_as_they_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    living: list[weakref.ref[nn.Module]] = []
    counts: list[int] = []

    def noting(*arguments: Any) -> ProbeResult:
        found = probe_model(*arguments)
        living.extend(weakref.ref(layer) for layer in found.linears)
        return found

    class Counted(PackedLinear):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            counts.append(sum(layer() is not None for layer in living))

    monkeypatch.setattr("serve_llm.engine.hf_backend.probe.probe_model", noting)
    monkeypatch.setattr("serve_llm.engine.hf_backend.decoder.PackedLinear", Counted)
    make_checkpoint(tmp_path, "olmo")
    engine_of(tmp_path)
    assert len(living) == len(counts) == 3 * 7 + 1  # four for attention, three for the MLP, and the head
    assert counts[-1] == 1
    assert all(count <= len(living) - packed + 4 for packed, count in enumerate(counts))
