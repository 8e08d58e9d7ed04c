"""How GGUF files name and store a model's weights, from `quantization_config` as `common.gguf` writes it. Torch-free.

Families name tensors as transformers does. In GGUF files all families share their names, so a tensor's name follows
from the parameters that it fills.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.quantization_spec import MXFP4, GroupQuantForm
from serve_llm.engine.model.spec import AttentionSpec, LayerSpec, ModelSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule

FORMS = {
    "Q4_0": GroupQuantForm(4, 32, has_zeros=False),
    "Q4_1": GroupQuantForm(4, 32, has_zeros=True, scale_bytes=4),
    "Q5_0": GroupQuantForm(8, 32, has_zeros=False),
    "Q5_1": GroupQuantForm(8, 32, has_zeros=True),
    "Q8_0": GroupQuantForm(8, 32, has_zeros=False),
    "Q2_K": GroupQuantForm(4, 16, has_zeros=True, scale_bytes=4),
    "Q3_K": GroupQuantForm(4, 16, has_zeros=False, scale_bytes=4),
    "Q4_K": GroupQuantForm(4, 32, has_zeros=True, scale_bytes=4),
    "Q5_K": GroupQuantForm(8, 32, has_zeros=True, scale_bytes=4),
    "Q6_K": GroupQuantForm(8, 16, has_zeros=False, scale_bytes=4),
    "IQ4_NL": GroupQuantForm(4, 32, has_zeros=False, has_table=True),
    "IQ4_XS": GroupQuantForm(4, 32, has_zeros=False, scale_bytes=4, has_table=True),
    "MXFP4": MXFP4,
    **{  # whose codes take 4 bits when their numbers are looked up in a table instead of a grid
        name: GroupQuantForm(4, group_size, has_zeros=False, scale_bytes=4, has_table=True)
        for group_size, names in ((16, ("IQ1_M", "IQ2_XS", "IQ2_S")), (32, ("IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S")))
        for name in names
    },
}
# Their query and key rows are stored in the order of rope that rotates adjacent dimensions together.
INTERLEAVED = ("llama", "mistral3", "granite", "granitemoe", "smollm3")
DECAY = "ssm_a"  # the only name without a suffix; stored as the factor of the time step
NAMES = {  # parameters of a layer -> name after "blk.N."
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    "ffn_post_norm": "post_ffw_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.q attention.k attention.v": "attn_qkv",
    "attention.q attention.gate": "attn_q",
    "attention.output": "attn_output",
    "attention.sinks": "attn_sinks",
    "attention.q_down": "attn_q_a",
    "attention.q_up": "attn_q_b",
    "attention.kv_down": "attn_kv_a_mqa",
    "attention.kv_norm": "attn_kv_a_norm",
    "attention.kv_up": "attn_kv_b",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.q_norm.{member}": "attn_q_norm",
    "attention.k_norm.{member}": "attn_k_norm",
    "ffn.gate": "ffn_gate",
    "ffn.up": "ffn_up",
    "ffn.gate ffn.up": "ffn_up",
    "ffn.down": "ffn_down",
    "ffn.router": "ffn_gate_inp",
    "ffn.router.correction": "exp_probs_b.bias",
    "ffn.experts.{member}.gate": "ffn_gate_exps",
    "ffn.experts.{member}.up": "ffn_up_exps",
    "ffn.experts.{member}.down": "ffn_down_exps",
    "ffn.experts.{member}.gate ffn.experts.{member}.up": "ffn_gate_up_exps",
    "ffn.shared_gate": "ffn_gate_inp_shexp",
    "ffn.shared.gate": "ffn_gate_shexp",
    "ffn.shared.up": "ffn_up_shexp",
    "ffn.shared.down": "ffn_down_shexp",
}
LINEAR_NAMES = {  # additional ones in layers with a gated DeltaNet
    "attention.z": "attn_gate",
    "attention.beta": "ssm_beta",
    "attention.alpha": "ssm_alpha",
    "attention.beta attention.alpha": "ssm_ba",
    "attention.conv.q attention.conv.k attention.conv.v": "ssm_conv1d",
    "attention.decay": DECAY,
    "attention.decay_bias": "ssm_dt.bias",
    "attention.norm": "ssm_norm",
    "attention.output": "ssm_out",
}
OUTPUT_NORMS = {"attention_norm": "post_attention_norm", "ffn_norm": "post_ffw_norm"}  # with norm position "output"
POST_NORM = {"ffn_norm": "post_attention_norm"}
ENCODER_NORMS = {"attention_norm": "attn_output_norm", "ffn_norm": "layer_output_norm"}
OWN_NAMES = {  # by architecture
    **dict.fromkeys(("gpt-oss", "glm4moe", "qwen3next", "qwen35", "qwen35moe"), POST_NORM),
    "deepseek2": {"attention.q_norm": "attn_q_a_norm"},
    **dict.fromkeys(("bert", "nomic-bert", "jina-bert-v2"), ENCODER_NORMS),
}
TAKES_TURNS = ("qwen35", "qwen35moe")  # see `GatedDeltaNetSpec`
QKVZ = "attention.q attention.k attention.v attention.z"
OLD_QKVZ = {QKVZ: "ssm_in"}  # in older files of Qwen3-Next, as in other checkpoints
IN_GROUPS = (QKVZ, "attention.q attention.gate", "attention.beta attention.alpha")  # rows in the family's own order
FALCON_NORMS = {"attention_norm": "attn_norm_2", "ffn_norm": "attn_norm"}  # where each has its own
OUTSIDE = {
    "final_norm": "output_norm",
    "head": "output",
    "positions": "position_embd",
    "token_types": "token_types",
    "embedding_norm": "token_embd_norm",
}
MASKED_HEAD = r"cls(\.norm)?\.weight"  # what predicts masked tokens in ModernBERT
ROPE_FACTORS = r"rope_freqs\.weight|rope_factors_(long|short)\.weight"  # read with the metadata
IMAGE_PART = r"(v|mm)\..*"  # in the same file, as Ollama stores it
IN_LAYER = "layers.{layer}."


@dataclass(frozen=True)
class GGUFTensors:
    """The quantised tensors of a file: name -> type, such as "Q4_K"."""

    architecture: str  # general.architecture
    types: Mapping[str, str]
    unused_layers: int = 0  # layers after the last one, for multi-token prediction
    joins_gate_up: bool = False  # gate and up of experts are in one tensor
    joins_qkv: bool = False  # queries, keys and values (and gates) are in one tensor; the family stores them separately

    def find_form(self, tensor: str) -> GroupQuantForm | None:
        """Return the form in which a weight stays in memory; None: in the model's dtype. tensor: its name in the
        file."""
        return FORMS.get(self.types.get(tensor, ""))


def read_gguf_config(config: ConfigReader) -> GGUFTensors:
    """Read the config. The caller must call config.done()."""
    architecture = config.text("architecture") or ""
    unused = config.integer("unused_layers", 0, lowest=0, highest=100)
    joins_gate_up = config.flag("joins_gate_up", False)
    joins_qkv = config.flag("joins_qkv", False)
    types: dict[str, str] = {}
    if (tensors := config.inner("tensors")) is not None:
        names = {name: name for name in FORMS}
        types = {tensor: tensors.choice(tensor, names, "") for tensor in tensors.keys}
        tensors.done()
    return GGUFTensors(architecture, types, unused, joins_gate_up, joins_qkv)


def apply_gguf(stored: GGUFTensors, spec: ModelSpec, weights: WeightMap) -> tuple[ModelSpec, WeightMap]:
    """Return the family's model as a GGUF file stores it. Raises ModelError for tensors that have no name there."""
    if stored.architecture in INTERLEAVED:
        spec = replace(spec, layers=tuple(_interleave(layer) for layer in spec.layers))
    if stored.architecture in TAKES_TURNS:
        spec = replace(spec, layers=tuple(_take_turns(layer) for layer in spec.layers))
    position = spec.layers[0].norm_position
    names = NAMES | (OUTPUT_NORMS if position == "output" else {}) | OWN_NAMES.get(stored.architecture, {})
    if stored.architecture == "falcon" and position == "parallel_two_norms":
        names |= FALCON_NORMS
    rules: Sequence[WeightRule] = weights.rules
    if stored.joins_qkv and stored.architecture == "qwen3next":
        names |= OLD_QKVZ
    elif stored.joins_qkv:
        rules = _join_qkv(spec, weights.rules)
    parts = [part for rule in rules for part in _split(rule, names | LINEAR_NAMES)]
    if stored.joins_gate_up:
        parts = _join_gate_up(parts)
    num_layers = len(spec.layers)
    unused = tuple(rf"blk\.{index}\..*" for index in range(num_layers, num_layers + stored.unused_layers))
    renamed = WeightMap(
        rules=tuple(_rename(part, names, spec) for part in parts),
        embedding="token_embd.weight",
        head="output.weight",
        prefix="",
        ignored=(ROPE_FACTORS, MASKED_HEAD, IMAGE_PART, *unused),
        is_gguf=True,
    )
    return spec, renamed


def _interleave(layer: LayerSpec) -> LayerSpec:
    attention = layer.attention
    if not isinstance(attention, AttentionSpec) or attention.rope is None:
        # In a layer without rope, rows are stored in that order too, for keys and queries alike, so scores are the
        # same.
        return layer
    return replace(layer, attention=replace(attention, rope=replace(attention.rope, interleaved=True)))


def _take_turns(layer: LayerSpec) -> LayerSpec:
    attention = layer.attention
    if not isinstance(attention, GatedDeltaNetSpec):
        return layer
    return replace(
        layer, attention=replace(attention, interleaved_key_heads=attention.num_heads > attention.num_kv_heads)
    )


def _join_qkv(spec: ModelSpec, rules: Sequence[WeightRule]) -> list[WeightRule]:
    """Replace the rules of queries, keys and values by one rule for all three."""
    attention = spec.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    sizes = tuple(heads * attention.head_dim for heads in (attention.num_heads, *[attention.num_kv_heads] * 2))
    joined = []
    for rule in rules:
        layer, _, kind = rule.parameters[0].rpartition(".")
        if layer == f"{IN_LAYER}attention.q":
            rule = replace(rule, parameters=tuple(f"{layer[:-1]}{name}.{kind}" for name in "qkv"), sizes=sizes)
        if layer not in (f"{IN_LAYER}attention.k", f"{IN_LAYER}attention.v"):
            joined.append(rule)
    return joined


def _join_gate_up(rules: Sequence[WeightRule]) -> list[WeightRule]:
    """Replace the rules of the gates and up-projections of experts by rules for both."""
    gate, up = (f"{IN_LAYER}ffn.experts.{{member}}.{name}.weight" for name in ("gate", "up"))
    joined = [replace(rule, parameters=(gate, up)) if rule.parameters == (gate,) else rule for rule in rules]
    return [rule for rule in joined if rule.parameters != (up,)]


def _split(rule: WeightRule, names: Mapping[str, str]) -> list[WeightRule]:
    """Return a rule per projection whose rows share a tensor or stack in other checkpoints, but not in GGUF files."""
    key = " ".join(re.sub(r"\.(weight|bias)$", "", one.removeprefix(IN_LAYER)) for one in rule.parameters)
    if key == QKVZ and key not in names:
        *qkv, z = rule.parameters
        return [
            replace(rule, parameters=tuple(qkv), sizes=rule.sizes[:-1], groups=1),
            replace(rule, parameters=(z,), sizes=(), groups=1),
        ]
    is_split = rule.members or (len(rule.parameters) > 1 and key not in names)
    if not is_split or rule.scales:
        return [rule]
    return [replace(rule, parameters=(parameter,), sizes=()) for parameter in rule.parameters]


def _rename(rule: WeightRule, names: Mapping[str, str], spec: ModelSpec) -> WeightRule:
    """Return the rule for the tensor in a GGUF file: norms have their full weight, matrices are (outputs, inputs), and
    stacks hold the tensors of all experts."""
    mixer = spec.layers[rule.layers[0] if rule.layers else 0].attention
    if rule.layers is not None and isinstance(mixer, GatedDeltaNetSpec):
        names = {**names, **LINEAR_NAMES}
    ends = [
        parameter if parameter.endswith((".weight", ".bias")) else f"{parameter}.weight"
        for parameter in rule.parameters
    ]
    parameters, kinds = zip(*(end.rsplit(".", 1) for end in ends), strict=True)
    key = " ".join(parameter.removeprefix(IN_LAYER) for parameter in parameters)
    if parameters[0].startswith(IN_LAYER):
        name = None if key not in names else f"blk.{{layer}}.{names[key]}"
    else:
        name = OUTSIDE.get(parameters[0])
    if name is None or rule.scales:
        raise ModelError(f"{re.sub(r'[{}]', '', rule.source)} of a {spec.architecture} has no name in GGUF files")
    if name.endswith(f".{DECAY}"):
        return replace(rule, source=name, transform="minus_exp")
    source = name if name.endswith(".bias") else f"{name}.{kinds[0]}"
    return replace(rule, source=source, transform="none", groups=rule.groups if key in IN_GROUPS else 1)
