"""How many bytes of weights a rank holds, from the spec alone: the arithmetic of what `decoder` builds. Torch-free.

Two figures. `loaded`: what is read from the checkpoint. `held`: what lies in memory afterwards, with what the fast
layout adds on a CPU: padding, and a second copy of an embedding that is also the head. Products in 8 bits have a scale
in float32 for every output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import MLA, Attention, Dense, Int8, Layer, Mixer, ModelSpec, MoE, Norm

# As kernels.cpu.linear packs them for AVX-512: outputs in panels of 16, inputs in units of 4 bytes; beside them a
# float32 bias, and in int8 a scale and a sum of 4 bytes for every output. Padding matters for tiny models only; other
# processors pad less.
PANEL = 16
UNIT = 4
SCALE = 4
FLOAT = 4  # bytes of float32
MULTIPLE = 16  # as kernels.linear_fp8 pads outputs and inputs


@dataclass(frozen=True)
class WeightBytes:
    loaded: int
    held: int


@dataclass(frozen=True)
class _Product:
    """A linear layer."""

    outputs: int
    inputs: int
    in_8_bits: bool = False
    bias: bool = False
    wide: bool = False  # in float32, whatever the model's dtype and the checkpoint's

    def loaded(self, element_bytes: int, stores_int8: bool) -> int:
        bias = self.outputs * element_bytes if self.bias else 0
        if self.in_8_bits and stores_int8:
            return self.outputs * (self.inputs + SCALE) + bias
        return self.outputs * self.inputs * element_bytes + bias

    def held_on_gpu(self, element_bytes: int) -> int:
        """In 8 bits as padded for torch's product."""
        element_bytes = max(element_bytes, FLOAT * self.wide)
        if not self.in_8_bits or self.outputs * self.inputs == 0:
            return self.loaded(element_bytes, stores_int8=False)
        outputs, inputs = (-(-size // MULTIPLE) * MULTIPLE for size in (self.outputs, self.inputs))
        return outputs * (inputs + SCALE + (element_bytes if self.bias else 0))

    def held(self, element_bytes: int) -> int:
        """As packed on a CPU."""
        element_bytes = max(element_bytes, FLOAT * self.wide)
        if self.outputs * self.inputs == 0:
            return self.outputs * element_bytes if self.bias else 0
        padded = -(-self.outputs // PANEL) * PANEL
        row = -(-self.inputs * (1 if self.in_8_bits else element_bytes) // UNIT) * UNIT
        return padded * (row + SCALE * (2 * self.in_8_bits + self.bias))


@dataclass(frozen=True)
class _Count:
    """Products, and the elements of everything else."""

    products: tuple[_Product, ...]
    others: int
    wide: int = 0  # of them in float32, whatever the model's dtype


def weight_bytes(spec: ModelSpec, shard: Shard, element_bytes: int, device: str) -> WeightBytes:
    """Of the rank that `shard` belongs to. element_bytes: of the model's dtype. device: "cpu" or "cuda"."""
    loaded = held = 0
    stores_int8 = spec.int8 is not None and spec.int8.stored
    for count in _counts(spec, shard):
        others = count.others * element_bytes + count.wide * (FLOAT - element_bytes)
        plain = others + sum(product.loaded(element_bytes, stores_int8) for product in count.products)
        loaded += plain
        if device == "cpu":
            held += others + sum(product.held(element_bytes) for product in count.products)
        else:
            held += others + sum(product.held_on_gpu(element_bytes) for product in count.products)
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
        project_in = _Product(spec.width, outer, _in_8_bits(spec, "project_in"))
        yield _Count((project_in,) if projected else (), vocabulary * outer + positions)
    kept = _kept(spec.int8)
    seen: dict[tuple[Layer, frozenset[str]], _Count] = {}
    for index in shard.layers:
        layer = spec.layers[index], kept.get(index, frozenset())
        if layer not in seen:
            seen[layer] = _Layer(spec.width, shard, spec.fp8 or spec.int8 is not None, layer[1]).count(layer[0])
        yield seen[layer]
    if shard.is_last:
        norm, wide = (0, 0) if spec.final_norm is None else _norm(spec.final_norm, spec.width)
        project_out = _Product(outer, spec.width, _in_8_bits(spec, "project_out"))
        head = _Product(vocabulary, outer, bias=spec.head_bias)
        yield _Count((project_out, head) if projected else (head,), norm, wide)


def _in_8_bits(spec: ModelSpec, product: str) -> bool:
    return spec.fp8 or (spec.int8 is not None and spec.int8.takes(product))


def _kept(int8: Int8 | None) -> dict[int, frozenset[str]]:
    """Layer -> its products that are not computed in int8, such as "ffn.down"."""
    found: dict[int, set[str]] = {}
    for product in int8.kept if int8 is not None else ():
        kind, _, rest = product.partition(".")
        if kind == "layers":
            index, _, name = rest.partition(".")
            found.setdefault(int(index), set()).add(name)
    return {index: frozenset(names) for index, names in found.items()}


@dataclass(frozen=True)
class _Layer:
    """How a layer is counted. The bias of a row-parallel product lies on the first rank of the stage."""

    width: int
    shard: Shard
    in_8_bits: bool
    kept: frozenset[str]  # products that are not

    def count(self, layer: Layer) -> _Count:
        products, others, wide = self._mixer(layer.mixer)
        norms = {"parallel": 1, "sandwich": 4}.get(layer.placement, 2)
        norm, wide_norm = _norm(layer.norm, norms * self.width)
        others, wide = others + norm, wide + wide_norm
        ffn = layer.ffn
        if isinstance(ffn, Dense):
            dense = self._dense("ffn", ffn, len(self.shard.ffn(ffn)), self.shard.place == 0)
            return _Count((*products, *dense), others, wide)
        correction = ffn.router.num_experts if ffn.router.correction else 0
        return _Count((*products, *self._experts(ffn)), others + correction, wide + correction)

    def _mixer(self, mixer: Mixer) -> tuple[list[_Product], int, int]:
        """Its products, the elements of everything else in it, and how many of them are in float32."""
        return self._latent(mixer) if isinstance(mixer, MLA) else self._attention(mixer)

    def _attention(self, mixer: Attention) -> tuple[list[_Product], int, int]:
        own = self.shard.attention(mixer)
        queries = len(own.heads) * mixer.head_dim
        keys = len(own.kv_heads) * mixer.head_dim
        others = wide = 0
        if mixer.head_norm is not None:
            heads = 2 if mixer.head_norm.kind == "rms" else len(own.heads) + len(own.kv_heads)
            others, wide = _norm(mixer.head_norm, heads * mixer.head_dim)
        others += 0 if mixer.projection_norm_eps is None else queries + keys
        sinks = len(own.heads) if mixer.sinks else 0
        qkv = self._product("attention.q", queries + 2 * keys, self.width, mixer.qkv_bias)  # q stands for all three
        return [qkv, self._output(queries, mixer.output_bias)], others + sinks, wide + sinks

    def _latent(self, mixer: MLA) -> tuple[list[_Product], int, int]:
        heads, rank = len(self.shard.attention(mixer).heads), mixer.q_lora_rank
        output = self._output(heads * mixer.value_dim, mixer.bias)
        if heads == 0:
            return [output], 0, 0
        queries = heads * (mixer.nope_dim + mixer.rope_dim)
        made = (queries if rank is None else rank) + mixer.head_dim  # of the hidden row, one product
        products = [output, self._product("attention.kv_down", made, self.width, mixer.bias)]
        if rank is not None:
            products.append(self._product("attention.q_up", queries, rank, False))
        for _ in range(heads):
            products.append(_Product(mixer.kv_lora_rank, mixer.nope_dim))
            products.append(_Product(mixer.value_dim, mixer.kv_lora_rank))
        return products, (rank or 0) + mixer.kv_lora_rank, 0

    def _output(self, inputs: int, bias: bool) -> _Product:
        return self._product("attention.output", self.width, inputs, bias and self.shard.place == 0)

    def _product(self, name: str, outputs: int, inputs: int, bias: bool) -> _Product:
        return _Product(outputs, inputs, self.in_8_bits and name not in self.kept, bias)

    def _dense(self, name: str, ffn: Dense, columns: int, adds_bias: bool) -> tuple[_Product, _Product]:
        up = self._product(f"{name}.up", columns * (2 if ffn.gated else 1), self.width, ffn.bias)  # and gate
        return up, self._product(f"{name}.down", self.width, columns, ffn.bias and adds_bias)

    def _experts(self, ffn: MoE) -> Iterator[_Product]:
        router, first, columns = ffn.router, self.shard.place == 0, len(self.shard.expert_columns(ffn))
        yield _Product(router.num_experts + ffn.shared_gate, self.width, bias=router.bias, wide=router.wide)
        for number in self.shard.experts(ffn):
            yield from self._dense(f"ffn.experts.{number}", ffn.expert, columns, first or ffn.whole)
        if ffn.shared is not None:
            yield from self._dense("ffn.shared", ffn.shared, len(self.shard.ffn(ffn.shared)), first)


def _norm(norm: Norm, width: int) -> tuple[int, int]:
    """Elements of its weight and bias, and how many of them are in float32."""
    elements = width * (int(norm.kind == "rms" or norm.affine) + int(norm.has_bias))
    return elements, elements if norm.wide else 0
