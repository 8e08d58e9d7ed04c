"""Vectors of checkpoints saved by sentence-transformers, compared with its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from serve_llm import LLM
from support.pooled import make_pooled_checkpoint
from support.tiny import SPECIAL_TOKENS, make_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # from sentence-transformers
TEXTS = ["the quick brown fox", "The River", "a", "a house on the hill, where words are written"]


def make_model(directory: Path, architecture: str) -> None:
    make_tokenizer(directory, make_pooled_checkpoint(directory, architecture, std=0.1))
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"pad_token": SPECIAL_TOKENS[0]}
    del settings["chat_template"]  # otherwise sentence-transformers makes a message of each text
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("architecture", "modes", "prompt", "has_dense"),
    [
        ("BertModel", ("cls", "max", "mean"), "Find: ", True),
        ("XLMRobertaModel", ("mean_sqrt_len_tokens", "weightedmean", "lasttoken"), "", False),
        ("ModernBertModel", ("mean",), "Find: ", False),
        ("NomicBertModel", ("max",), "", True),
        ("Qwen3Model", ("lasttoken",), "Find: ", False),
    ],
)
def test_vectors_are_those_of_sentence_transformers(
    architecture: str, modes: tuple[str, ...], prompt: str, has_dense: bool, tmp_path: Path
) -> None:
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    make_model(tmp_path / "plain", architecture)
    transformer = Transformer(str(tmp_path / "plain"), do_lower_case=architecture == "BertModel")
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode=modes)
    size = pooling.get_embedding_dimension()
    dense = [Dense(size, 24, activation_function=torch.nn.Tanh())] if has_dense else []
    prompts = {"query": prompt} if prompt else {}
    model = SentenceTransformer(
        modules=[transformer, pooling, *dense, Normalize()],
        prompts=prompts,
        default_prompt_name="query" if prompt else None,
        device="cpu",
    )
    model.save(str(tmp_path / "saved"))
    expected = model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)
    with LLM(str(tmp_path / "saved"), dtype="float32") as llm:
        found = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=1e-5)
