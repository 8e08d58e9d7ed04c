"""Translate the metadata of a GGUF file to the config.json of the same model.

No key is dropped silently: each of the architecture's keys is translated, listed as ignored, or refused by name.
"""

from __future__ import annotations

import struct

from serve_llm.common.errors import ModelError, UnsupportedModel
from serve_llm.common.gguf.adaptations import ADAPTATIONS, JOINS_GATE_UP, JOINS_QKV, UNUSED_LAYERS
from serve_llm.common.gguf.architectures import (
    ARCHITECTURES,
    COMMON,
    IGNORED,
    IGNORED_PREFIXES,
    MIXTRAL,
    GGUFArchitecture,
)
from serve_llm.common.gguf.file import GGUFFile

FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
FUSED_EXPERTS = ".ffn_gate_up_exps.weight"  # gate and up of a layer's experts in one tensor
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the frequencies, as in llama3 scaling
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
DEFAULT_ROPE_BASE = 10000.0
LARGEST_HEAD = 1 << 16
# Metadata other than the architecture's; the last is a publisher's.
NAMESPACES = ("general.", "tokenizer.", "quantize.", "split.", "mradermacher.")
EMPTY_WHEN_ZERO = ("expert_count", "expert_used_count", "attention.sliding_window", "attention.q_lora_rank")
SAMPLING = "general.sampling."
SAMPLING_KEYS = {  # after SAMPLING -> key of generation_config.json; others are samplers that do not exist here
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
POOLING = "pooling_type"
POOLING_TYPES = {1: "mean", 2: "cls", 3: "lasttoken"}  # with sentence-transformers' names; 0 for none


def build_config(file: GGUFFile) -> dict[str, object]:
    """Return the config.json. Raises UnsupportedModel for an unknown architecture, ModelError that names the key
    otherwise."""
    return _Translation(file).translate()


def read_pooling(file: GGUFFile) -> str | None:
    """How hidden states become an embedding, if the file says so. Raises ModelError for unsupported pooling."""
    key = f"{file.metadata.get('general.architecture')}.{POOLING}"
    kind = file.metadata.get(key)
    if kind in (None, 0):
        return None
    if not isinstance(kind, int) or kind not in POOLING_TYPES:
        supported = ", ".join(f"{number} for {name}" for number, name in POOLING_TYPES.items())
        raise ModelError(f"{file.path}: {key} {kind!r} is not supported (supported: {supported})")
    return POOLING_TYPES[kind]


def read_sampling(file: GGUFFile) -> dict[str, object]:
    """Return the sampling defaults that the file recommends, as generation_config.json has them."""
    found = {translated: file.metadata.get(f"{SAMPLING}{key}") for key, translated in SAMPLING_KEYS.items()}
    return {translated: _simplify(value) for translated, value in found.items() if value is not None}


class _Translation:
    """The architecture's metadata, taken key by key."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            supported = ", ".join(sorted(ARCHITECTURES))
            raise UnsupportedModel(
                f"{file.path}: general.architecture {name!r} is not supported in GGUF files (supported: {supported})"
            )
        self._name = name
        self._rest = {
            key.removeprefix(f"{name}."): _simplify(value)
            for key, value in file.metadata.items()
            if key.startswith(f"{name}.")
        }
        for key in EMPTY_WHEN_ZERO:
            if self._rest.get(key) == 0:
                del self._rest[key]
        self._known: GGUFArchitecture = ARCHITECTURES[name]
        if name == "llama" and "expert_count" in self._rest:
            self._known = MIXTRAL

    def translate(self) -> dict[str, object]:
        self._check_file()
        tensors = self._file.tensors
        config: dict[str, object] = {
            "architectures": [self._known.name],
            "vocab_size": self._shape(EMBEDDING)[0],
            "tie_word_embeddings": HEAD not in tensors,
            "dtype": FLOAT_TYPES.get(tensors[EMBEDDING].type.name, "bfloat16"),
            "rope_theta": DEFAULT_ROPE_BASE,
            **self._known.constants,
        }
        for key, translated in (COMMON | dict(self._known.keys)).items():
            value = self.take(key)
            if value is not None:
                config[translated] = value
        config |= {flag: f"blk.0.{tensor}" in tensors for flag, tensor in self._known.flags.items()}
        if not self._known.has_own_heads:
            self._add_heads(config)
        self._add_rope_scaling(config)
        for adapt in ADAPTATIONS.get(self._name, ()):
            adapt(config, self)
        for usual, name in self._known.names.items():
            if usual in config:
                value = config.pop(usual)
                config |= {name: value} if name else {}
        self.take(POOLING)
        unread = {key for key in self._rest.keys() - set(IGNORED) if not key.startswith(IGNORED_PREFIXES)}
        if unknown := sorted(f"{self._name}.{key}" for key in unread):
            raise ModelError(
                f"{self._file.path}: unknown metadata keys, which may mean another computation: {', '.join(unknown)}"
            )
        stored_as = {key: config.pop(key) for key in (JOINS_QKV, UNUSED_LAYERS) if key in config}
        if any(name.endswith(FUSED_EXPERTS) for name in tensors):
            stored_as[JOINS_GATE_UP] = True
        types = {name: tensor.type.name for name, tensor in sorted(tensors.items())}
        config["quantization_config"] = {
            "quant_method": "gguf",
            "architecture": self._name,
            "tensors": {name: kind for name, kind in types.items() if kind not in FLOAT_TYPES},
        } | stored_as
        return config

    def _check_file(self) -> None:
        metadata = self._file.metadata
        if metadata.get("general.type", "model") != "model":
            raise self._refused("general.type", "is not supported (supported: model)")
        for key in metadata:
            if not key.startswith((*NAMESPACES, f"{self._name}.")):
                raise self._refused(key, "is unknown")
        if EMBEDDING not in self._file.tensors:
            raise ModelError(f"{self._file.path} lacks tensor {EMBEDDING}")

    def _add_heads(self, config: dict[str, object]) -> None:
        """The size of heads, the part that rope rotates, and the scale of scores."""
        width, heads = (self._size(config, key) for key in ("hidden_size", "num_attention_heads"))
        config["head_dim"] = self.take("attention.key_length") or width // heads
        head_dim = self._size(config, "head_dim")
        if self.take("attention.value_length") not in (None, head_dim):
            raise self._refused(f"{self._name}.attention.value_length", f"differs from key_length {head_dim}")
        rotated = self.take("rope.dimension_count")
        if self._known.has_partial_rotary and isinstance(rotated, int):
            config["partial_rotary_factor"] = (rotated + 0.5) / head_dim  # times head_dim, rounded down: `rotated`
        elif rotated not in (None, head_dim):
            raise self._refused(f"{self._name}.rope.dimension_count", f"differs from key_length {head_dim}")
        if self._known.scales_by_width is not None:
            is_scaled = config.get("num_hidden_layers") == self._known.scales_by_width
            config["query_pre_attn_scalar"] = width // heads if is_scaled else head_dim

    def _add_rope_scaling(self, config: dict[str, object]) -> None:
        kind = self.take("rope.scaling.type") or "none"
        factor = self.take("rope.scaling.factor")
        original = self.take("rope.scaling.original_context_length")
        attention_factor = self.take("rope.scaling.attn_factor")
        scaling: dict[str, object]
        if LONG_FACTORS in self._file.tensors:
            scaling = {
                "rope_type": "longrope",
                "long_factor": self._read_factors(LONG_FACTORS),
                "short_factor": self._read_factors(SHORT_FACTORS),
                "original_max_position_embeddings": original,
                "attention_factor": attention_factor,
            }
        elif ROPE_FACTORS in self._file.tensors:
            factors = self._read_factors(ROPE_FACTORS)
            scaling = {
                "rope_type": "longrope",
                "long_factor": factors,
                "short_factor": factors,
                "original_max_position_embeddings": config.get("max_position_embeddings"),
                "attention_factor": 1.0,
            }
        elif kind in ("linear", "yarn"):
            if attention_factor is not None:
                raise self._refused(f"{self._name}.rope.scaling.attn_factor", f"is not supported with {kind} scaling")
            scaling = {"rope_type": kind, "factor": factor}
            if kind == "yarn":
                scaling["original_max_position_embeddings"] = original
                scaling |= {} if self._known.truncates_yarn else {"truncate": False}
                scaling |= self._take_yarn()
        elif kind == "none":
            return
        else:
            raise self._refused(f"{self._name}.rope.scaling.type", "is not supported (supported: none, linear, yarn)")
        config["rope_scaling"] = scaling

    def _take_yarn(self) -> dict[str, object]:
        """Yarn settings that newer files contain, most of them with the usual values."""
        for key in ("yarn_ext_factor", "yarn_attn_factor"):
            if self.take(f"rope.scaling.{key}") not in (None, 1.0):
                raise self.refuse(f"rope.scaling.{key}", "is not supported (supported: 1)")
        found = {key: self.take(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
        return {key: value for key, value in found.items() if value is not None}

    def _read_factors(self, name: str) -> list[float]:
        """A tensor with one number for each pair of dimensions that rope rotates."""
        shape = self._shape(name)
        tensor = self._file.tensors[name]
        if tensor.type.name != "F32" or len(shape) != 1 or shape[0] > LARGEST_HEAD:
            raise ModelError(f"{self._file.path}: {name} is not a list of F32 numbers of a head's size")
        with self._file.path.open("rb") as file:
            file.seek(tensor.start)
            return list(struct.unpack(f"<{shape[0]}f", file.read(tensor.num_bytes)))

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._file.tensors:
            raise ModelError(f"{self._file.path} lacks tensor {name}")
        return self._file.tensors[name].shape

    def _size(self, config: dict[str, object], key: str) -> int:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            names = {translated: name for name, translated in COMMON.items()} | {"head_dim": "attention.key_length"}
            raise ModelError(f"{self._file.path}: {self._name}.{names[key]} must be a number above 0, but is {value!r}")
        return value

    def take(self, key: str) -> object:
        """See `Metadata`, as for the other methods without an underscore."""
        return self._rest.pop(key, None)

    def take_size(self, key: str) -> int:
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self._file.path}: {self._name}.{key} must be a number above 0, but is {value!r}")
        return value

    def find_shape(self, tensor: str) -> tuple[int, ...] | None:
        stored = self._file.tensors.get(tensor)
        return None if stored is None else stored.shape

    def refuse(self, key: str, why: str) -> ModelError:
        return self._refused(f"{self._name}.{key}", why)

    def _refused(self, key: str, why: str) -> ModelError:
        return ModelError(f"{self._file.path}: {key} {self._file.metadata.get(key)!r} {why}")


def _simplify(value: object) -> object:
    """Replace a list of equal values, which some files have for layer settings, by one value. Write a number that was
    stored as float32 as briefly as float32 allows: 1e-06, not 9.999999974752427e-07."""
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        value = value[0]
    if not isinstance(value, float):
        return value
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if abs(short) < 3e38 and struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
