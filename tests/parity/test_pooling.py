"""Vectors of embedding models and classifiers against transformers, in float32, on random checkpoints."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from serve_llm.common.types import LOWEST_PRIORITY, FinishReason
from serve_llm.engine.loop import EngineCore
from support.engine import generate, greedy, make_engine
from support.matrix import mostly_slow
from support.pooled import (
    DECODERS,
    ENCODERS,
    TOKEN_CLASSIFIERS,
    compute_vectors,
    make_pooled_checkpoint,
    pooled_config_of,
    pooling_request,
    reference_hidden,
    reference_logits,
)
from support.reference import reference_model
from support.tiny import make_checkpoint, make_tokenizer

TOLERANCE = 1e-5


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(vocab_size) for _ in range(count)] for count in (1, 2, 7, 16, 17, 40, 63)]


@torch.inference_mode()
def reference_next_logits(directory: Path, ids: list[int]) -> Tensor:
    return reference_model(directory)(torch.tensor([ids])).logits[0, -1]


def check(found: dict[int, Tensor], expected: list[Tensor]) -> None:
    for number, vector in enumerate(expected):
        torch.testing.assert_close(found[number], vector, atol=TOLERANCE, rtol=TOLERANCE)


class CopyRecorder(TorchDispatchMode):
    """Records the shapes of cloned tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


class TestDecoders:
    @pytest.mark.pairs("TP + embeddings")
    @pytest.mark.parametrize("tensor", mostly_slow([1, 2], [2]))
    @pytest.mark.parametrize("architecture", DECODERS)
    def test_in_chunks_beside_each_other(self, architecture: str, tensor: int, tmp_path: Path) -> None:
        chosen = prompts(make_pooled_checkpoint(tmp_path, architecture))
        engine = make_engine(tmp_path, tensor=tensor, block_size=8, max_num_batched_tokens=24)
        if architecture.endswith("Classification"):
            expected = [reference_logits(tmp_path, architecture, ids) for ids in chosen]
        else:
            expected = [functional.normalize(reference_hidden(tmp_path, architecture, ids)[-1:])[0] for ids in chosen]
        check(compute_vectors(engine, [pooling_request(n, ids) for n, ids in enumerate(chosen)]), expected)
        again = compute_vectors(engine, [pooling_request(n, ids) for n, ids in enumerate(chosen)])
        check(again, expected)

    def test_modules_of_sentence_transformers(self, tmp_path: Path) -> None:
        modules = ["Pooling", "Dense", "Dense"]
        chosen = prompts(make_pooled_checkpoint(tmp_path, "Qwen3Model", modules=modules))
        engine = make_engine(tmp_path, block_size=8)
        found = compute_vectors(engine, [pooling_request(n, ids) for n, ids in enumerate(chosen)])
        for number, ids in enumerate(chosen):
            vector = reference_hidden(tmp_path, "Qwen3Model", ids)[-1]
            for folder in ("2_Dense", "3_Dense"):
                weights = load_file(tmp_path / folder / "model.safetensors")
                vector = torch.tanh(functional.linear(vector, weights["linear.weight"], weights["linear.bias"]))
            torch.testing.assert_close(found[number], vector, atol=TOLERANCE, rtol=TOLERANCE)

    @pytest.mark.parametrize("tensor", [1, 2])
    def test_tokens_as_classes(self, tensor: int, tmp_path: Path) -> None:
        vocab_size = make_checkpoint(tmp_path, "qwen3")
        make_tokenizer(tmp_path, vocab_size)
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        ids = [tokenizer.token_to_id(token) for token in ("n", "y")]
        chosen = prompts(vocab_size)
        options = {"classifier_from_token": ("n", "y"), "max_num_batched_tokens": 24}
        engine = make_engine(tmp_path, tensor=tensor, **options)
        found = compute_vectors(engine, [pooling_request(n, prompt) for n, prompt in enumerate(chosen)])
        check(found, [reference_next_logits(tmp_path, prompt)[ids] for prompt in chosen])

    @pytest.mark.parametrize("architecture", [name for name in (*DECODERS, *ENCODERS) if name.endswith("Model")])
    def test_bfloat16_is_close(self, architecture: str, tmp_path: Path) -> None:
        vocab_size = make_pooled_checkpoint(tmp_path, architecture, std=0.05)
        chosen = [[2 + token_id % 300 for token_id in ids] for ids in prompts(vocab_size)]
        pooling = "last" if architecture in DECODERS else "mean"
        engine = make_engine(tmp_path, dtype="bfloat16", pooling_type=pooling)
        exact = make_engine(tmp_path, pooling_type=pooling)
        requests = [pooling_request(n, ids) for n, ids in enumerate(chosen)]
        found, expected = compute_vectors(engine, requests), compute_vectors(exact, requests)
        for number, vector in found.items():
            # A random Gemma with four norms per layer magnifies rounding: 0.99987 for one token (transformers:
            # 0.99991).
            least = 0.9998 if architecture.startswith("Gemma") else 0.9999
            assert functional.cosine_similarity(vector, expected[number], dim=0) > least

    def test_beside_generation_of_one_engine(self, tmp_path: Path) -> None:
        vocab_size = make_checkpoint(tmp_path, "qwen3")
        chosen = prompts(vocab_size)
        alone = generate(make_engine(tmp_path), [greedy(n, ids, 6, logprobs=1) for n, ids in enumerate(chosen)])
        engine = make_engine(tmp_path, runner="generate", convert="embed", max_num_batched_tokens=24)
        requests = [greedy(n, ids, 6, logprobs=1) for n, ids in enumerate(chosen)]
        pooled = [pooling_request(100 + n, ids) for n, ids in enumerate(chosen)]
        results = generate(engine, [*requests, *pooled])
        for number in range(len(chosen)):
            assert results[number].token_ids == alone[number].token_ids
            assert results[number].logprobs == alone[number].logprobs
            assert results[100 + number].finish_reason is FinishReason.STOP
        found = compute_vectors(engine, pooled)
        expected = [functional.normalize(reference_hidden(tmp_path, "Qwen3Model", ids)[-1:])[0] for ids in chosen]
        check({number - 100: vector for number, vector in found.items()}, expected)


class TestEncoders:
    @pytest.mark.parametrize("tensor", mostly_slow([1, 2], [2]))
    @pytest.mark.parametrize("architecture", ENCODERS)
    def test_whole_prompts(self, architecture: str, tensor: int, tmp_path: Path) -> None:
        # With larger weights the layers magnify rounding errors, those of transformers included, beyond the tolerance.
        vocab_size = make_pooled_checkpoint(tmp_path, architecture, std=0.15)
        chosen = [[2 + token_id % 300 for token_id in ids] for ids in prompts(vocab_size)]
        is_classifier = architecture.endswith("Classification")
        options = {} if is_classifier else {"pooling_type": "mean"}
        engine = make_engine(tmp_path, tensor=tensor, max_model_len=64, max_num_batched_tokens=64, **options)
        if is_classifier:
            expected = [reference_logits(tmp_path, architecture, ids) for ids in chosen]
        else:
            hidden = [reference_hidden(tmp_path, architecture, ids).mean(0) for ids in chosen]
            expected = [functional.normalize(vector, dim=0) for vector in hidden]
        check(compute_vectors(engine, [pooling_request(n, ids) for n, ids in enumerate(chosen)]), expected)

    @pytest.mark.parametrize("architecture", ["BertModel", "ModernBertModel"])
    def test_more_ranks_than_heads(self, architecture: str, tmp_path: Path) -> None:
        vocab_size = make_pooled_checkpoint(tmp_path, architecture, std=0.15)
        chosen = [[2 + token_id % 300 for token_id in ids] for ids in prompts(vocab_size)]
        engine = make_engine(tmp_path, tensor=6, max_model_len=64, max_num_batched_tokens=64, pooling_type="mean")
        hidden = [reference_hidden(tmp_path, architecture, ids).mean(0) for ids in chosen]
        expected = [functional.normalize(vector, dim=0) for vector in hidden]
        check(compute_vectors(engine, [pooling_request(n, ids) for n, ids in enumerate(chosen)]), expected)

    def test_gte_as_its_authors_publish_it(self, tmp_path: Path) -> None:
        """The "ntk" scaling of NewModel multiplies the base by the factor and divides all frequencies by the factor to
        the power of 2 over head_dim (12)."""
        theirs = tmp_path / "transformers"
        rope = {"rope_type": "linear", "rope_theta": 20_000.0 * 8.0, "factor": 8.0 ** (2 / 12)}
        vocab_size = make_pooled_checkpoint(theirs, "GteModel", std=0.15, rope_parameters=rope)
        ours = tmp_path / "published"
        ours.mkdir()
        shutil.copy(theirs / "model.safetensors", ours)
        config = json.loads((theirs / "config.json").read_text())
        del config["rope_parameters"]
        published = {"architectures": ["NewModel"], "model_type": "new", "position_embedding_type": "rope"}
        published |= {"rope_scaling": {"type": "ntk", "factor": 8.0}, "rope_theta": 20_000}
        (ours / "config.json").write_text(json.dumps(config | published))
        chosen = [[2 + token_id % 300 for token_id in ids] for ids in prompts(vocab_size)]
        engine = make_engine(ours, pooling_type="mean")
        hidden = [reference_hidden(theirs, "GteModel", ids).mean(0) for ids in chosen]
        expected = [functional.normalize(vector, dim=0) for vector in hidden]
        check(compute_vectors(engine, [pooling_request(n, ids) for n, ids in enumerate(chosen)]), expected)

    def test_pairs_of_texts(self, tmp_path: Path) -> None:
        architecture = "BertForSequenceClassification"
        chosen = prompts(make_pooled_checkpoint(tmp_path, architecture))
        engine = make_engine(tmp_path)
        requests = [pooling_request(n, ids, second_text_start=len(ids) // 2) for n, ids in enumerate(chosen)]
        requests.append(pooling_request(100, chosen[3]))
        found = compute_vectors(engine, requests)
        for number, ids in enumerate(chosen):
            types = torch.tensor([[0] * (len(ids) // 2) + [1] * (len(ids) - len(ids) // 2)])
            expected = reference_logits(tmp_path, architecture, ids, token_type_ids=types)
            torch.testing.assert_close(found[number], expected, atol=TOLERANCE, rtol=TOLERANCE)
        check({0: found[100]}, [reference_logits(tmp_path, architecture, chosen[3])])

    def test_first_token(self, tmp_path: Path) -> None:
        modules = ["Pooling", "Dense", "Normalize"]
        chosen = prompts(make_pooled_checkpoint(tmp_path, "BertModel", modules=modules, pooling="cls_token"))
        found = compute_vectors(make_engine(tmp_path), [pooling_request(n, ids) for n, ids in enumerate(chosen)])
        weights = load_file(tmp_path / "2_Dense" / "model.safetensors")
        for number, ids in enumerate(chosen):
            first = reference_hidden(tmp_path, "BertModel", ids)[0]
            dense = torch.tanh(functional.linear(first, weights["linear.weight"], weights["linear.bias"]))
            check({0: found[number]}, [functional.normalize(dense, dim=0)])

    def test_several_poolings(self, tmp_path: Path) -> None:
        chosen = prompts(make_pooled_checkpoint(tmp_path, "BertModel", modules=["Pooling"]))
        modes = ["lasttoken", "weightedmean", "max", "mean_sqrt_len_tokens", "mean", "cls"]
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": modes}))
        found = compute_vectors(make_engine(tmp_path), [pooling_request(n, ids) for n, ids in enumerate(chosen)])
        for number, ids in enumerate(chosen):
            hidden = reference_hidden(tmp_path, "BertModel", ids)
            weights = torch.arange(1.0, len(ids) + 1)[:, None]
            total = hidden.sum(0)
            weighted = (weights * hidden).sum(0) / weights.sum()
            means = [hidden.max(0).values, total / len(ids) ** 0.5, total / len(ids)]
            check({0: found[number]}, [torch.cat([hidden[-1], weighted, *means, hidden[0]])])

    def test_hidden_states_are_not_copied(self, tmp_path: Path) -> None:
        chosen = prompts(make_pooled_checkpoint(tmp_path, "BertModel", modules=["Pooling"], pooling="cls_token"))
        engine = make_engine(tmp_path)
        requests = [pooling_request(n, ids) for n, ids in enumerate(chosen)]
        with CopyRecorder() as recorder:
            assert len(compute_vectors(engine, requests)) == len(chosen)
        num_tokens = sum(map(len, chosen))
        assert (num_tokens, pooled_config_of("BertModel")["hidden_size"]) not in recorder.shapes


class TestTokens:
    """Vectors of each token."""

    def check(self, engine: EngineCore, chosen: list[list[int]], expected: list[Tensor]) -> None:
        requests = [pooling_request(n, ids, pools_tokens=True) for n, ids in enumerate(chosen)]
        found = compute_vectors(engine, [*requests, pooling_request(100, chosen[3])])
        assert len(found.pop(100)) == expected[3].shape[1], "one vector beside them"
        check({number: vector.view_as(expected[number]) for number, vector in found.items()}, expected)

    @pytest.mark.parametrize("tensor", mostly_slow([1, 2], [2]))
    @pytest.mark.parametrize("architecture", ["Qwen3Model", "LlamaModel"])
    def test_of_decoders_in_chunks(self, architecture: str, tensor: int, tmp_path: Path) -> None:
        chosen = prompts(make_pooled_checkpoint(tmp_path, architecture))
        chosen.append(chosen[-1])  # its blocks are cached
        engine = make_engine(tmp_path, tensor=tensor, block_size=8, max_num_batched_tokens=24)
        expected = [reference_hidden(tmp_path, architecture, ids) for ids in chosen]
        for _ in range(2):
            self.check(engine, chosen, expected)

    def test_of_a_prompt_that_is_preempted(self, tmp_path: Path) -> None:
        chosen = prompts(make_pooled_checkpoint(tmp_path, "Qwen3Model"))
        engine = make_engine(tmp_path, max_num_seqs=1, max_num_batched_tokens=24)
        engine.add_requests([pooling_request(0, chosen[-1], pools_tokens=True, priority=LOWEST_PRIORITY)])
        engine.step()
        found = compute_vectors(engine, [pooling_request(1, chosen[0])])
        assert engine.scheduler.stats().num_preemptions > 0
        expected = reference_hidden(tmp_path, "Qwen3Model", chosen[-1])
        check({0: found[0].view_as(expected)}, [expected])

    @pytest.mark.parametrize("tensor", mostly_slow([1, 2], [2]))
    @pytest.mark.parametrize("architecture", ["BertModel", "XLMRobertaModel", "ModernBertModel", "Gemma3TextModel"])
    def test_of_encoders(self, architecture: str, tensor: int, tmp_path: Path) -> None:
        vocab_size = make_pooled_checkpoint(tmp_path, architecture, std=0.1)
        chosen = [[2 + token_id % 300 for token_id in ids] for ids in prompts(vocab_size)]
        options = {"max_model_len": 64, "max_num_batched_tokens": 64, "pooling_type": "mean"}
        engine = make_engine(tmp_path, tensor=tensor, **options)
        self.check(engine, chosen, [reference_hidden(tmp_path, architecture, ids) for ids in chosen])

    @pytest.mark.parametrize("tensor", mostly_slow([1, 2], [2]))
    @pytest.mark.parametrize("architecture", TOKEN_CLASSIFIERS)
    def test_classes_of_encoders(self, architecture: str, tensor: int, tmp_path: Path) -> None:
        vocab_size = make_pooled_checkpoint(tmp_path, architecture, std=0.1)
        chosen = [[2 + token_id % 300 for token_id in ids] for ids in prompts(vocab_size)]
        engine = make_engine(tmp_path, tensor=tensor, max_model_len=64, max_num_batched_tokens=64)
        self.check(engine, chosen, [reference_logits(tmp_path, architecture, ids) for ids in chosen])

    def test_of_modules_of_sentence_transformers(self, tmp_path: Path) -> None:
        modules = ["Pooling", "Dense", "Normalize"]
        chosen = prompts(make_pooled_checkpoint(tmp_path, "BertModel", modules=modules, pooling="cls_token"))
        weights = load_file(tmp_path / "2_Dense" / "model.safetensors")
        expected = []
        for ids in chosen:
            hidden = reference_hidden(tmp_path, "BertModel", ids)
            expected.append(torch.tanh(functional.linear(hidden, weights["linear.weight"], weights["linear.bias"])))
        self.check(make_engine(tmp_path), chosen, expected)
