"""Which EAGLE-3 heads are served, and how others are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from serve_llm.common.errors import ModelError, OptionError, ServeError
from serve_llm.common.hub import read_config
from serve_llm.common.options.sources import make_options
from serve_llm.engine.draft_model.resolve import resolve_draft_model
from serve_llm.engine.model.eagle_spec import LAYER_IDS, find_hidden_state_layers
from support.eagle import Served, build_head, use_speculators_format, write_head
from support.engine import make_engine
from support.resolved import resolve_all
from support.tiny import make_checkpoint


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served")
    make_checkpoint(directory, "llama")
    return directory


def resolve_head(served: Path, head: Path, config: dict[str, object], **given: object) -> None:
    head.mkdir(exist_ok=True)
    (head / "config.json").write_text(json.dumps(config))
    options = make_options(str(served), speculative_config={"method": "eagle3", "model": str(head)}, **given)
    resolve_draft_model(options, resolve_all(options, str(served), read_config(served))[0], head)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architectures": ["Eagle3DraftModel"]}, "architecture Eagle3DraftModel is not an EAGLE-3 head"),
        ({"draft_vocab_size": None}, "draft_vocab_size is missing|must be"),
        ({"draft_vocab_size": 332}, "draft_vocab_size must be an integer of at most 331"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported"),
        ({"hidden_size": 64}, "it is for a model of hidden size 64 and 331 ids; the served one has 60 and 331"),
        ({"vocab_size": 400}, "of hidden size 60 and 400 ids"),
        ({LAYER_IDS: [1, 2, 3]}, "layer_ids must be a list of integers from 0 to 2"),
        ({LAYER_IDS: [1, 2]}, r"layer_ids must name 3 different layers, not \[1, 2\]"),
        ({LAYER_IDS: [1, 1, 2]}, r"layer_ids must name 3 different layers, not \[1, 1, 2\]"),
        ({"eagle_config": {LAYER_IDS: [0, 1, 2]}}, "eagle_config: .*layer_ids must be a list of integers from 0 to 1"),
        ({LAYER_IDS: [0, 1, 2], "eagle_config": {LAYER_IDS: [0, 1]}}, "layer_ids is there twice, also in eagle_config"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False is not supported"),
        ({"parallel_drafting": True}, "unknown keys, which may mean another computation: parallel_drafting"),
    ],
)
def test_heads_that_are_refused(changed: dict[str, object], message: str, served: Path, tmp_path: Path) -> None:
    config = build_head(Served(served), 97).config
    resolve_head(served, tmp_path, {**config, "eagle_config": {"use_aux_hidden_state": True}})
    with pytest.raises(ModelError, match=f"^--speculative-config: the draft model .*({message})"):
        resolve_head(
            served, tmp_path, {key: value for key, value in {**config, **changed}.items() if value is not None}
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"speculators_model_type": "peagle"}, "speculators_model_type 'peagle' is not supported"),
        ({"norm_before_residual": None}, "norm_before_residual is missing"),
        ({"norm_before_fc": True}, "norm_before_fc is not supported"),
        ({"parallel_drafting": 2}, "unknown keys, which may mean another computation: parallel_drafting"),
        ({"transformer_layer_config": {}}, "transformer_layer_config is empty"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "model_type 'qwen3' is not supported"),
        ({"draft_vocab_size": 332}, "draft_vocab_size must be an integer of at most 331"),
    ],
)
def test_heads_of_speculators_that_are_refused(
    changed: dict[str, object], message: str, served: Path, tmp_path: Path
) -> None:
    head = build_head(Served(served), 97)
    use_speculators_format(head, (0, 1, 2))
    resolve_head(served, tmp_path, dict(head.config))
    with pytest.raises(ModelError, match=f"^--speculative-config: the draft model .*({message})"):
        resolve_head(
            served, tmp_path, {key: value for key, value in {**head.config, **changed}.items() if value is not None}
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_impl": "transformers"}, "transformers' own code does not give out hidden states; omit --model-impl"),
    ],
)
def test_options_that_do_not_fit(given: dict[str, object], message: str, served: Path, tmp_path: Path) -> None:
    config = dict(build_head(Served(served), 97).config)
    with pytest.raises(OptionError, match=message):
        resolve_head(served, tmp_path, config, **given)


def test_a_model_of_few_layers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "served", "llama", num_hidden_layers=2)
    make_checkpoint(tmp_path / "more", "llama", num_hidden_layers=3)
    config = dict(build_head(Served(tmp_path / "more"), 97).config)
    with pytest.raises(ModelError, match="it reads three layers of the served model, which has 2"):
        resolve_head(tmp_path / "served", tmp_path / "head", config)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc.weight", None, "the checkpoint lacks fc.weight"),
        ("fc.bias", torch.zeros(60), "no parameter of an EAGLE-3 head uses fc.bias"),
        ("d2t", None, "the checkpoint lacks d2t, which says for which ids the head's 97 stand"),
        ("d2t", torch.zeros(96, dtype=torch.int64), "d2t must be 97 whole numbers"),
        ("d2t", torch.full((97,), 300), "d2t does not name 97 different ids below 331"),
        ("d2t", -torch.arange(97), "d2t does not name 97 different ids below 331"),
        ("norm.weight", torch.zeros(61), "norm.weight"),
    ],
)
def test_files_that_do_not_fit(
    name: str, tensor: torch.Tensor | None, message: str, served: Path, tmp_path: Path
) -> None:
    head = build_head(Served(served), 97)
    head.tensors.pop(name, None)
    if tensor is not None:
        head.tensors[name] = tensor
    config = {"method": "eagle3", "model": str(write_head(head, tmp_path))}
    with pytest.raises(ServeError, match=f"^--speculative-config: the draft model in .*{message}"):
        make_engine(served, speculative_config=config)


def test_names_of_other_converters(served: Path, tmp_path: Path) -> None:
    head = build_head(Served(served), 97)
    head.tensors = {
        name if name in ("d2t", "t2d", "lm_head.weight") else "model." + name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in head.tensors.items()
    }
    make_engine(served, speculative_config={"method": "eagle3", "model": str(write_head(head, tmp_path))})


def test_the_layers_that_it_looks_at() -> None:
    """As in the authors' code, vLLM and SGLang, the head reads the inputs of layers 2, n / 2 and n - 3."""
    assert find_hidden_state_layers(32) == (2, 16, 29)
    assert find_hidden_state_layers(80) == (2, 40, 77)
