"""EAGLE-3 heads (arXiv:2503.01840): which hidden states of the served model they read, and their config.json. No torch.

A head is one decoder layer that guesses ids from hidden states of the served model instead of from ids alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families import llama
from serve_llm.engine.model.spec import ModelSpec

# As EAGLE's authors, SpecForge and vLLM's converters write it into config.json.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
NUM_STATES = 3  # hidden states of each token that a head reads
FEWEST_LAYERS = 3
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class EagleSpec:
    """What an EAGLE-3 head has beside the parts of its `ModelSpec`, a decoder of one layer."""

    target_hidden_size: int  # that of the served model
    draft_vocab_size: int  # ids that it can guess
    norm_before_residual: bool  # the residual stream begins with the normed hidden state


def find_hidden_state_layers(num_layers: int) -> tuple[int, ...]:
    """The layers of the served model whose inputs the head reads: a low, a middle and a high one."""
    return tuple(sorted((2, num_layers // 2, num_layers - 3)))


def read_eagle(raw: Mapping[str, object], target: ModelSpec) -> tuple[ModelSpec, EagleSpec]:
    """Read a head's config.json. target: the served model. Raises ModelError if the head is not one for it."""
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture} is not an EAGLE-3 head; supported are {', '.join(ARCHITECTURES)}"
        )
    if "draft_vocab_size" not in raw:
        raise ModelError("config.json: draft_vocab_size is missing: this is not an EAGLE-3 head")
    config = ConfigReader(raw)
    config.only("num_hidden_layers", 1)
    spec = llama.read_plain(config, str(architecture))
    eagle = EagleSpec(
        target_hidden_size=config.integer("target_hidden_size", spec.hidden_size),
        draft_vocab_size=config.integer("draft_vocab_size", highest=spec.vocab_size),
        norm_before_residual=config.flag("norm_before_residual", False),
    )
    _refuse_other_states(config)
    config.ignore("target_model_type")
    config.done()
    if eagle.target_hidden_size != target.hidden_size or spec.vocab_size != target.vocab_size:
        raise ModelError(
            f"it is for a model of hidden size {eagle.target_hidden_size} and {spec.vocab_size:,} ids; the served one "
            f"has {target.hidden_size} and {target.vocab_size:,}"
        )
    if len(target.layers) < FEWEST_LAYERS:
        raise ModelError(f"it reads three layers of the served model, which has {len(target.layers)}")
    return replace(spec, tie_word_embeddings=False), eagle


def _refuse_other_states(config: ConfigReader) -> None:
    """Layers of one's own choice: implementations disagree on whether their inputs or their outputs are meant."""
    config.empty(LAYER_IDS)
    inner = config.inner("eagle_config")
    if inner is not None:
        inner.empty(LAYER_IDS)
        inner.only("use_aux_hidden_state", None, True)
        inner.done()
