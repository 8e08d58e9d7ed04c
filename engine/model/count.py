"""How many bytes of weights a rank holds, from the spec alone: the arithmetic of what `decoder` builds. Torch-free.

Two figures. `loaded`: what is read from the checkpoint. `held`: what lies in memory afterwards, with what the fast
layout adds on a CPU: padding, and a second copy of an embedding that is also the head. Products in int8 have a scale in
float32 for every output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import Layer, ModelSpec, Norm

# As kernels.cpu.linear packs them for AVX-512: outputs in panels of 16, inputs in units of 4 bytes; beside them a
# float32 bias, and in int8 a scale and a sum of 4 bytes for every output. Padding matters for tiny models only; other
# processors pad less.
PANEL = 16
UNIT = 4
SCALE = 4
IN_LAYER = ("attention.q", "attention.output", "ffn.up", "ffn.down")  # q and up stand for what is fused with them


@dataclass(frozen=True)
class WeightBytes:
    loaded: int
    held: int


@dataclass(frozen=True)
class _Product:
    """A linear layer."""

    outputs: int
    inputs: int
    is_int8: bool = False
    bias: bool = False

    def loaded(self, element_bytes: int, stores_int8: bool) -> int:
        bias = self.outputs * element_bytes if self.bias else 0
        if self.is_int8 and stores_int8:
            return self.outputs * (self.inputs + SCALE) + bias
        return self.outputs * self.inputs * element_bytes + bias

    def held(self, element_bytes: int) -> int:
        """As packed on a CPU."""
        if self.outputs * self.inputs == 0:
            return self.outputs * element_bytes if self.bias else 0
        padded = -(-self.outputs // PANEL) * PANEL
        row = -(-self.inputs * (1 if self.is_int8 else element_bytes) // UNIT) * UNIT
        return padded * (row + SCALE * (2 * self.is_int8 + self.bias))


@dataclass(frozen=True)
class _Count:
    """Products, and the elements of everything else."""

    products: tuple[_Product, ...]
    others: int


def weight_bytes(spec: ModelSpec, shard: Shard, element_bytes: int, device: str) -> WeightBytes:
    """Of the rank that `shard` belongs to. element_bytes: of the model's dtype. device: "cpu" or "cuda"."""
    loaded = held = 0
    stores_int8 = spec.int8 is not None and spec.int8.stored
    for count in _counts(spec, shard):
        others = count.others * element_bytes
        plain = others + sum(product.loaded(element_bytes, stores_int8) for product in count.products)
        loaded += plain
        if device == "cpu":
            held += others + sum(product.held(element_bytes) for product in count.products)
        else:
            held += plain
    if spec.tied_head and shard.is_first and shard.is_last:  # counted as embedding and as head
        head = len(shard.vocabulary(spec.vocab_size)) * (spec.embedding_width or spec.width) * element_bytes
        loaded -= head
        held -= 0 if device == "cpu" else head
    return WeightBytes(loaded, held)


def _counts(spec: ModelSpec, shard: Shard) -> Iterator[_Count]:
    """One for each layer of the rank, and the two ends."""
    outer = spec.embedding_width or spec.width
    vocabulary = len(shard.vocabulary(spec.vocab_size))
    projected = spec.embedding_width is not None
    if shard.is_first:
        positions = 0 if spec.positions is None else spec.positions.count * spec.width
        project_in = _Product(spec.width, outer, _is_int8(spec, "project_in"))
        yield _Count((project_in,) if projected else (), vocabulary * outer + positions)
    seen: dict[tuple[Layer, tuple[bool, ...]], _Count] = {}
    for index in shard.layers:
        layer = spec.layers[index]
        is_int8 = tuple(_is_int8(spec, f"layers.{index}.{product}") for product in IN_LAYER)
        if (layer, is_int8) not in seen:
            seen[layer, is_int8] = _layer(layer, spec.width, shard, is_int8)
        yield seen[layer, is_int8]
    if shard.is_last:
        norm = 0 if spec.final_norm is None else _norm(spec.final_norm, spec.width)
        project_out = _Product(outer, spec.width, _is_int8(spec, "project_out"))
        head = _Product(vocabulary, outer, bias=spec.head_bias)
        yield _Count((*((project_out,) if projected else ()), head), norm)


def _is_int8(spec: ModelSpec, product: str) -> bool:
    return spec.int8 is not None and spec.int8.takes(product)


def _layer(layer: Layer, width: int, shard: Shard, is_int8: tuple[bool, ...]) -> _Count:
    """Column-parallel, then row-parallel; the bias of a row-parallel product lies on the first rank of the stage.

    is_int8: of each product in the order of IN_LAYER.
    """
    mixer, ffn = layer.mixer, layer.ffn
    own = shard.attention(mixer)
    queries = len(own.heads) * mixer.head_dim
    qkv = queries + 2 * len(own.kv_heads) * mixer.head_dim
    columns = len(shard.ffn(ffn))
    up = columns * (2 if ffn.gated else 1)
    others = {"parallel": 1, "sandwich": 4}.get(layer.placement, 2) * _norm(layer.norm, width)
    if mixer.head_norm is not None:
        heads = 2 if mixer.head_norm.kind == "rms" else len(own.heads) + len(own.kv_heads)
        others += heads * mixer.head_dim
    others += 0 if mixer.projection_norm_eps is None else queries + len(own.kv_heads) * mixer.head_dim
    shapes = ((qkv, width), (width, queries), (up, width), (width, columns))
    first = shard.place == 0
    biases = (mixer.qkv_bias, mixer.output_bias and first, ffn.bias, ffn.bias and first)
    products = tuple(_Product(*shape, *rest) for shape, *rest in zip(shapes, is_int8, biases, strict=True))
    return _Count(products, others)


def _norm(norm: Norm, width: int) -> int:
    return width * (int(norm.kind == "rms" or norm.affine) + int(norm.has_bias))
