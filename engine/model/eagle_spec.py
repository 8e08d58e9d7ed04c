"""EAGLE-3 heads (arXiv:2503.01840): which hidden states of the served model they read, and their config.json. No torch.

A head is one decoder layer that predicts ids from hidden states of the served model instead of from ids alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families import llama
from serve_llm.engine.model.spec import ModelSpec

# As written into config.json by EAGLE's authors, SpecForge and vLLM's converters.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
NUM_STATES = 3  # hidden states of each token that a head reads
MIN_LAYERS = 3
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_CONFIG = "transformer_layer_config"  # only in the format of the library speculators
SPECULATORS_KEYS = ("draft_vocab_size", "norm_before_residual", "target_hidden_size", LAYER_IDS)


@dataclass(frozen=True)
class EagleSpec:
    """What an EAGLE-3 head has in addition to its `ModelSpec`, a decoder of one layer."""

    target_hidden_size: int  # hidden size of the served model
    draft_vocab_size: int  # ids that it can draft
    norm_before_residual: bool  # the residual stream begins with the normed hidden state
    state_layers: tuple[int, ...]  # layers of the served model, ascending, whose inputs the head reads


def find_hidden_state_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers of the served model whose inputs a head reads by default: a low, a middle and a high one."""
    return tuple(sorted((2, num_layers // 2, num_layers - 3)))


def read_eagle(raw: Mapping[str, object], target: ModelSpec) -> tuple[ModelSpec, EagleSpec]:
    """Read a head's config.json. target: the served model. Raises ModelError if the head is not one for it."""
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if LAYER_CONFIG in raw:
        raw = _flatten(raw)
    elif architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture} is not an EAGLE-3 head; supported are {', '.join(ARCHITECTURES)}"
        )
    if "draft_vocab_size" not in raw:
        raise ModelError("config.json: draft_vocab_size is missing: this is not an EAGLE-3 head")
    config = ConfigReader(raw)
    config.only("num_hidden_layers", 1)
    spec = llama.read_plain(config, str(architecture))
    if len(target.layers) < MIN_LAYERS:
        raise ModelError(f"it reads three layers of the served model, which has {len(target.layers)}")
    eagle = EagleSpec(
        target_hidden_size=config.integer("target_hidden_size", spec.hidden_size),
        draft_vocab_size=config.integer("draft_vocab_size", highest=spec.vocab_size),
        norm_before_residual=config.flag("norm_before_residual", False),
        state_layers=_read_state_layers(config, len(target.layers)),
    )
    config.ignore("target_model_type")
    config.done()
    if eagle.target_hidden_size != target.hidden_size or spec.vocab_size != target.vocab_size:
        raise ModelError(
            f"it is for a model of hidden size {eagle.target_hidden_size} and {spec.vocab_size:,} ids; the served one "
            f"has {target.hidden_size} and {target.vocab_size:,}"
        )
    return replace(spec, tie_word_embeddings=False), eagle


def _flatten(raw: Mapping[str, object]) -> dict[str, object]:
    """Convert the config.json of the library speculators to the form that others write. Raises ModelError."""
    config = ConfigReader(raw)
    layer = config.inner(LAYER_CONFIG)
    if layer is None:
        raise ModelError(f"config.json: {LAYER_CONFIG} is empty")
    layer.only("model_type", None, "llama")
    config.only("speculators_model_type", "eagle3")
    config.flag("norm_before_residual", False)
    if "norm_before_residual" not in config.keys:  # its writers and readers have different defaults
        raise ModelError("config.json: norm_before_residual is missing")
    config.empty("norm_before_fc", "fc_norm", "norm_output")
    config.ignore("tie_word_embeddings", "has_no_defaults_at_init")
    config.ignore("speculators_config", "speculators_version")  # the served model, and the number of drafts
    config.ignore("embed_requires_grad", "enable_sp_ulysses")  # settings of its training
    config.ignore(*SPECULATORS_KEYS)
    config.done()
    inner = raw[LAYER_CONFIG]
    assert isinstance(inner, dict)
    return inner | {key: raw[key] for key in SPECULATORS_KEYS if raw.get(key) is not None}


def _read_state_layers(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the layers that the file names, by inputs as in vLLM; in `eagle_config` by outputs, as in SGLang."""
    found = config.integers(LAYER_IDS, highest=num_layers - 1)
    inner = config.inner("eagle_config")
    if inner is not None:
        outputs = inner.integers(LAYER_IDS, highest=num_layers - 2)
        inner.only("use_aux_hidden_state", None, True)
        inner.done()
        if found and outputs:
            raise ModelError(f"config.json: {LAYER_IDS} is there twice, also in eagle_config; remove one")
        if outputs:
            found = tuple(layer + 1 for layer in outputs)
    if not found:
        return find_hidden_state_layers(num_layers)
    if len(found) != NUM_STATES or len(set(found)) != NUM_STATES:
        raise ModelError(f"config.json: {LAYER_IDS} must name {NUM_STATES} different layers, not {list(found)}")
    return tuple(sorted(found))
