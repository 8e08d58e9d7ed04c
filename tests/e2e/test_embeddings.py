"""Embeddings over HTTP and offline, against real engine processes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx
import openai
import pytest
import torch
from torch.nn import functional

from serve_llm import LLM
from support.daemon import Daemon
from support.pooled import make_pooled_checkpoint, reference_hidden, reference_logits
from support.tiny import make_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "embeddings.md").read_text()
CURLS = re.findall(r"^ {4}(curl .*)\n\n {4}(\{.*(?:\n {4}.*)*)", PAGE, re.MULTILINE)
TEXTS = ["the quick brown fox", "the river", "a house on the hill, where words are written"]


def make_model(directory: Path, architecture: str, **options: object) -> None:
    make_tokenizer(directory, make_pooled_checkpoint(directory, architecture, **options))


@pytest.mark.slow
def test_the_clients_of_openai(tmp_path: Path) -> None:
    make_model(tmp_path, "Qwen3Model", modules=["Pooling", "Normalize"])
    with Daemon(str(tmp_path), "--served-model-name", "embedder", environ={"OMP_NUM_THREADS": "1"}) as daemon:
        client = openai.OpenAI(base_url=f"{daemon.wait_until_serving()}/v1", api_key="none", max_retries=0)
        reply = client.embeddings.create(model="embedder", input=TEXTS)  # asks for base64
        numbers = client.embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
        ids = client.post("/../tokenize", body={"prompt": TEXTS[0]}, cast_to=dict[str, object])["tokens"]
        assert isinstance(ids, list)
        expected = functional.normalize(reference_hidden(tmp_path, "Qwen3Model", ids)[-1], dim=0)
        for one in (reply, numbers, client.embeddings.create(model="embedder", input=ids)):
            torch.testing.assert_close(torch.tensor(one.data[0].embedding), expected, atol=1e-5, rtol=1e-5)
        assert reply.usage.prompt_tokens == reply.usage.total_tokens > len(ids)
        with pytest.raises(openai.BadRequestError, match="generates no text"):
            client.completions.create(model="embedder", prompt="x")


def test_examples_of_the_page() -> None:
    """Their answers have the fields that the page shows. Those about classes need a classifier."""
    commands = [(shlex.split(curl), shown) for curl, shown in CURLS if "classif" not in curl]
    assert len(commands) == 6
    with Daemon("demo", "--convert", "embed", "--kv-cache-memory", "64MiB") as daemon:
        url = daemon.wait_until_serving()
        for command, shown in commands:
            body = json.loads(command[command.index("-d") + 1])
            reply = httpx.post(command[1].replace("http://127.0.0.1:8000", url), json=body)
            assert reply.status_code == 200, reply.text
            assert set(re.findall(r'"(\w+)":', shown)) <= set(re.findall(r'"(\w+)":', reply.text))


def test_offline(tmp_path: Path) -> None:
    make_model(tmp_path, "BertForSequenceClassification", num_labels=1)
    with LLM(str(tmp_path)) as llm:
        scores = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
        classes = llm.classify(TEXTS[0], use_tqdm=False)
    for output in scores:
        logit = reference_logits(tmp_path, "BertForSequenceClassification", output.prompt_token_ids)[0]
        assert output.outputs.score == pytest.approx(float(torch.sigmoid(logit)), abs=1e-5)
    assert len(classes[0].outputs.probs) == 1 and classes[0].outputs.label == "LABEL_0"


@pytest.mark.slow
def test_offline_beside_generation() -> None:
    with LLM("demo", max_model_len="1k", kv_cache_memory="64MiB", runner="generate", convert="embed") as llm:
        text = llm.generate("import os\n", use_tqdm=False)[0].outputs[0].text
        embeddings = [output.outputs.embedding for output in llm.embed([*TEXTS, TEXTS[0]], use_tqdm=False)]
    assert text
    assert embeddings[0] == embeddings[3] != embeddings[1]
    assert sum(number * number for number in embeddings[1]) == pytest.approx(1.0, abs=1e-5)
