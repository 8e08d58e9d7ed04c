"""How many bytes of weights a rank holds, from the spec alone: the arithmetic of what `decoder` builds. Torch-free.

Two figures. `loaded`: what is read from the checkpoint. `held`: what lies in memory afterwards, with what the fast
layout adds on a CPU: padding, and a second copy of an embedding that is also the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import Layer, ModelSpec, Norm

# oneDNN's blocks on a processor with AVX-512, measured (3.12, bf16 and float32, 260 shapes): outputs in groups of 64,
# inputs in as many as fill 64 bytes. Matters for tiny models only; other processors pad less.
PACKED_OUTPUTS = 64
PACKED_INPUT_BYTES = 64


@dataclass(frozen=True)
class WeightBytes:
    loaded: int
    held: int


@dataclass(frozen=True)
class _Count:
    """Matrices of linear layers as (outputs, inputs), and the elements of everything else."""

    products: tuple[tuple[int, int], ...]
    others: int


def weight_bytes(spec: ModelSpec, shard: Shard, element_bytes: int, device: str) -> WeightBytes:
    """Of the rank that `shard` belongs to. element_bytes: of the model's dtype. device: "cpu" or "cuda"."""
    loaded = held = 0
    for count in _counts(spec, shard):
        plain = (count.others + sum(outputs * inputs for outputs, inputs in count.products)) * element_bytes
        loaded += plain
        if device == "cpu":
            packed = sum(_packed_bytes(outputs, inputs, element_bytes) for outputs, inputs in count.products)
            held += packed + count.others * element_bytes
        else:
            held += plain
    if spec.tied_head and shard.is_first and shard.is_last:  # counted as embedding and as head
        head = len(shard.vocabulary(spec.vocab_size)) * (spec.embedding_width or spec.width) * element_bytes
        loaded -= head
        held -= 0 if device == "cpu" else head
    return WeightBytes(loaded, held)


def _packed_bytes(outputs: int, inputs: int, element_bytes: int) -> int:
    in_block = PACKED_INPUT_BYTES // element_bytes
    return -(-outputs // PACKED_OUTPUTS) * PACKED_OUTPUTS * -(-inputs // in_block) * in_block * element_bytes


def _counts(spec: ModelSpec, shard: Shard) -> Iterator[_Count]:
    """One for each layer of the rank, and the two ends."""
    outer = spec.embedding_width or spec.width
    vocabulary = len(shard.vocabulary(spec.vocab_size))
    projected = spec.embedding_width is not None
    if shard.is_first:
        positions = 0 if spec.positions is None else spec.positions.count * spec.width
        yield _Count(((spec.width, outer),) if projected else (), vocabulary * outer + positions)
    seen: dict[Layer, _Count] = {}
    for index in shard.layers:
        layer = spec.layers[index]
        if layer not in seen:
            seen[layer] = _layer(layer, spec.width, shard)
        yield seen[layer]
    if shard.is_last:
        norm = 0 if spec.final_norm is None else _norm(spec.final_norm, spec.width)
        yield _Count((*(((outer, spec.width),) if projected else ()), (vocabulary, outer)), norm)


def _layer(layer: Layer, width: int, shard: Shard) -> _Count:
    """Column-parallel, then row-parallel; the bias of a row-parallel product lies on the first rank of the stage."""
    mixer, ffn = layer.mixer, layer.ffn
    own = shard.attention(mixer)
    queries = len(own.heads) * mixer.head_dim
    qkv = queries + 2 * len(own.kv_heads) * mixer.head_dim
    columns = len(shard.ffn(ffn))
    up = columns * (2 if ffn.gated else 1)
    summed_bias = width if shard.place == 0 else 0
    others = 2 * _norm(layer.norm, width)
    others += (qkv if mixer.qkv_bias else 0) + (summed_bias if mixer.output_bias else 0)
    others += up + summed_bias if ffn.bias else 0
    others += 0 if mixer.head_norm is None else 2 * _norm(mixer.head_norm, mixer.head_dim)
    return _Count(((qkv, width), (width, queries), (up, width), (width, columns)), others)


def _norm(norm: Norm, width: int) -> int:
    return width if norm.kind == "rms" else 2 * width if norm.affine else 0
