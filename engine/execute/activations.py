"""How much memory one step of the largest size takes besides weights and KV cache: an estimate. Torch-free.

It follows the parts of a step in their order (`model/*`, `kernels/*`), adds up what lives at the same time in each, and
takes the largest. Small vectors (ids, positions, one number per row) and NumPy's arrays of the host are left out.

A CPU is taken to have the compiled kernels and a GPU the portable ones. Not counted: what a CPU without a compiler, or
with AMX, whose products are oneDNN's, takes beyond that.

A test compares it with what torch's profiler sees a real step allocate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serve_llm.engine.config import CacheRow, Config
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import MLA, Attention, Dense, Layer, Mixer, ModelSpec, MoE, Norm
from serve_llm.engine.parallel.layout import HeadShare
from serve_llm.engine.schedule.sequence import GroupLayout

FLOAT = 4  # bytes of float32, in which norms, rope, activations and scores are computed
UNIT = 4  # bytes of which rows of a product on a CPU are made, as in kernels.cpu.linear
CHOICE = 20  # bytes of a weight, an expert's number and a place in the order of the experts
KEY_TILE = 128  # tokens of keys that attention visits at a time, as in kernels.attention
# of attention kernels that make no tensors but results, as in kernels.cpu.library: of keys and values, of latent rows
COMPILED_HEAD_DIMS = range(16, 257, 8)
COMPILED_LATENT_DIMS = range(16, 1025, 8)


@dataclass(frozen=True)
class Step:
    """The largest step: `tokens` in all, `singles` of them each alone in its sequence, `sampled` rows of logits."""

    tokens: int
    singles: int
    sampled: int
    context: int  # tokens of the longest sequence
    element: int  # bytes of the model's dtype
    on_cpu: bool
    cache: CacheRow
    in_8_bits: bool = False  # products of the layers
    compiled_attention: bool = False  # on a CPU other kernels are compiled in any case

    @classmethod
    def largest(cls, config: Config, element: int) -> Step:
        """On a CPU, as few prompts as can be take the tokens that decoding rows leave; on a GPU, what `Worker` runs."""
        if config.device == "cuda":
            tokens = min(config.max_num_batched_tokens, config.max_model_len - 1)
            return cls(
                tokens, 0, min(config.max_num_seqs, tokens), config.max_model_len, element, False, config.cache_row
            )
        tokens = min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)
        sequences = min(config.max_num_seqs, tokens)
        prompts = -(-(tokens - sequences) // max(config.max_model_len - 1, 1))
        return cls(tokens, sequences - prompts, sequences, config.max_model_len, element, True, config.cache_row)

    def wide(self, elements: int) -> int:
        """Bytes of a float32 copy; none where the model computes in float32 anyway."""
        return elements * FLOAT if self.element != FLOAT else 0

    def linear(self, rows: int, inputs: int, outputs: int) -> tuple[int, int]:
        """The peak of a product of the layers, and what is left of it."""
        if not self.in_8_bits:
            return self.head(rows, inputs, outputs)
        result = rows * outputs * self.element
        numbers = rows * inputs
        return result + numbers + _whole_units(rows, inputs, 1), result

    def head(self, rows: int, inputs: int, outputs: int) -> tuple[int, int]:
        """The same of a product in the model's dtype."""
        result = rows * outputs * self.element
        return result + (_whole_units(rows, inputs, self.element) if self.on_cpu else 0), result


def _whole_units(rows: int, inputs: int, element: int) -> int:
    """Bytes of the copy that kernels.cpu.linear makes of rows that are not whole units."""
    row = -(-inputs * element // UNIT) * UNIT
    return rows * row if row != inputs * element else 0


def peak_bytes(spec: ModelSpec, shard: Shard, groups: tuple[GroupLayout, ...], config: Config, element: int) -> int:
    """Of the rank that `shard` belongs to. groups: of the cache; element: bytes of the model's dtype."""
    step = Step.largest(config, element)
    compiled = step.on_cpu and all(
        group.head_dim in (COMPILED_LATENT_DIMS if group.is_latent else COMPILED_HEAD_DIMS) for group in spec.kv_groups
    )
    step = replace(step, in_8_bits=spec.int8 is not None or spec.fp8, compiled_attention=compiled)
    last = len(spec.layers) - 1
    kinds = {
        (spec.layers[index], group, step.sampled if index == last else step.tokens)
        for group, of in zip(groups, spec.kv_groups, strict=True)
        for index in of.layers
        if index in shard.layers
    }
    ropes = {(layer.mixer.rope, layer.mixer.rope_dim) for layer, *_ in kinds if layer.mixer.rope is not None}
    angles = sum(step.tokens * dims * FLOAT for _, dims in ropes)
    layers = max(angles + _layer(step, layer, group, spec.width, shard, going_on) for layer, group, going_on in kinds)
    return max(layers, _logits(step, spec, shard)) if shard.is_last else layers


def _layer(step: Step, layer: Layer, group: GroupLayout, width: int, shard: Shard, going_on: int) -> int:
    """Hidden rows and what a half reads of them; the decoder keeps those of before the layer until it is done.

    going_on: tokens of which the second half is computed, in the last layer those that are sampled; all of a prompt
    whose log-probabilities are asked for are not counted.
    """
    row = width * step.element
    copies = 1 if layer.placement in ("post", "inside") else 2
    held = copies * step.tokens * row
    attention = held + _mixer(step, layer.mixer, group, width, shard)
    made = step.tokens * row  # by attention
    chosen = 2 * going_on * row if going_on < step.tokens else 0  # of the hidden rows and what was made
    inside = going_on * row if layer.placement in ("inside", "sandwich") else 0  # before its norm
    joined = going_on * row + inside + _norm_of_sum(step, layer.norm, going_on * width)
    between = (1 if layer.placement == "parallel" else copies) * going_on * row
    if isinstance(layer.ffn, Dense):
        made_of = _ffn(step, layer.ffn, width, len(shard.ffn(layer.ffn)), going_on)
    else:
        made_of = _experts(step, layer.ffn, width, shard, going_on)
    ffn = held + between + made_of
    return max(attention, ffn, held + made + chosen, held + (chosen or made) + joined)


def _norm_of_sum(step: Step, norm: Norm, elements: int) -> int:
    """Peak of a sum and its norm, of so many elements, besides the two that are added."""
    size = elements * step.element
    if norm.kind == "layer":
        return 2 * size
    return size if step.on_cpu else size + _rms_norm(step, elements)


def _rms_norm(step: Step, elements: int) -> int:
    """Peak of a norm in torch operations, its result of `elements` included."""
    return step.wide(elements) + elements * FLOAT + elements * step.element


def _ffn(step: Step, ffn: Dense, width: int, columns: int, rows: int, read: int = 0) -> int:
    """read: bytes of what it reads that go when the first product is done."""
    peak, up = step.linear(rows, width, columns * (2 if ffn.gated else 1))
    elements = rows * columns
    # float32 copies alive at once
    floats = {"silu": 2, "gelu": 3, "gelu_tanh": 4, "relu": 0, "relu2": 0, "swigluoai": 3}[ffn.activation]
    active = elements * step.element
    inner = active if step.on_cpu or not floats else step.wide(elements) + floats * elements * FLOAT
    if ffn.activation == "swigluoai":  # of which there is no compiled kernel
        inner = floats * elements * FLOAT + (active if step.element != FLOAT else 0)
    down, _ = step.linear(rows, columns, width)
    return max(read + peak, up + inner, active + down)


def _experts(step: Step, ffn: MoE, width: int, shard: Shard, rows: int) -> int:
    """Where one expert gets all tokens, those of other engines included, as `kernels.moe` computes it; then the sum,
    and the shared expert's. On a GPU all experts are computed together, but those in 8 bits."""
    each, wide = rows * width * step.element, step.wide(rows * width)
    top_k, columns = ffn.router.top_k, len(shard.expert_columns(ffn)) if shard.experts(ffn) else 0
    made = top_k * each
    computed = top_k if shard.engines == 1 else min(top_k, len(shard.experts(ffn))) * shard.engines  # of each row
    if step.on_cpu or step.in_8_bits:
        busiest = shard.engines * rows
        expert = _ffn(step, ffn.expert, width, columns, busiest, read=shard.engines * each) if columns else 0
        peak = computed * each + max(expert, 2 * wide or each)
    else:
        peak = max(_ffn(step, ffn.expert, width, columns, computed * rows), computed * each + each)
    if shard.engines > 1:  # what comes from all of them, beside what is made of it; what was sent, what comes back
        peak = max(computed * each + peak, made + computed * each, 3 * made)
    peak += top_k * rows * CHOICE
    if ffn.shared is None:
        return peak
    gated = each + 2 * wide if ffn.shared_gate else each
    return max(peak, each + max(_ffn(step, ffn.shared, width, len(shard.ffn(ffn.shared)), rows), gated + each))


def _mixer(step: Step, mixer: Mixer, group: GroupLayout, width: int, shard: Shard) -> int:
    if isinstance(mixer, MLA):
        return _latent_attention(step, mixer, group, width, len(shard.attention(mixer).heads))
    return _attention(step, mixer, group, width, shard)


def _latent_attention(step: Step, mixer: MLA, group: GroupLayout, width: int, heads: int) -> int:
    if heads == 0:
        return step.linear(step.tokens, 0, width)[0]
    tokens, each, row = step.tokens, mixer.nope_dim + mixer.rope_dim, mixer.head_dim
    turned, absorbed = tokens * heads * mixer.rope_dim, tokens * heads * mixer.kv_lora_rank * step.element
    rank = mixer.q_lora_rank
    peak, live = step.linear(tokens, width, (heads * each if rank is None else rank) + row)
    if rank is not None:
        normed = tokens * rank * step.element
        up_peak, up = step.linear(tokens, rank, heads * each)
        peak, live = max(peak, live + 2 * normed, live + normed + up_peak), live + up
    rope = step.wide(turned) + 2 * turned * FLOAT
    keys = tokens * row * step.element + _rms_norm(step, tokens * mixer.kv_lora_rank)
    peak = max(peak, live + rope, live + turned * step.element + keys)
    query = absorbed + turned * step.element
    peak = max(peak, live + turned * step.element + absorbed + query)
    mixed, tiles = absorbed, [0]
    if not step.compiled_attention:
        mixed = query  # of which the values are a part
        for spans, rows in ((1, min(tokens - step.singles, 64)), (step.singles, 1)):
            tiles.append(_tile_attention(step, group, spans, rows, heads, 1, row, parts=1) if spans else 0)
    values = tokens * heads * mixer.value_dim * step.element
    summed, _ = step.linear(tokens, heads * mixer.value_dim, width)
    return max(peak, query + mixed + max(tiles), mixed + values + summed)


def _attention(step: Step, mixer: Attention, group: GroupLayout, width: int, shard: Shard) -> int:
    own = shard.attention(mixer)
    heads, kv_heads = len(own.heads), len(own.kv_heads)
    queries, keys = step.tokens * heads * mixer.head_dim, step.tokens * kv_heads * mixer.head_dim
    qkv_peak, qkv = step.linear(step.tokens, width, (heads + 2 * kv_heads) * mixer.head_dim)
    heads_peak, query = _heads(step, mixer, queries, keys, qkv)
    shared = _queries_per_kv_head(own, mixer.heads // mixer.kv_heads)
    even = step.tokens * shared * kv_heads * mixer.head_dim  # with padding where KV heads have different numbers
    live = query + even * step.element * (1 if even == queries else 2)
    tiles = [0]
    if not step.compiled_attention:
        if step.cache.scale_bytes:  # a key or value is rounded, the other one is done
            tiles.append(
                step.wide(keys) + keys * (FLOAT + 1) + step.tokens * kv_heads * 2 * step.cache.num_bytes(mixer.head_dim)
            )
        rows = min(step.tokens - step.singles, 64)
        tiles.append(_tile_attention(step, group, 1, rows, shared, kv_heads, mixer.head_dim))
        if step.singles:
            tiles.append(_tile_attention(step, group, step.singles, 1, shared, kv_heads, mixer.head_dim))
    summed, _ = step.linear(step.tokens, heads * mixer.head_dim, width)
    return max(qkv_peak, heads_peak, live + max(*tiles, summed))


def _heads(step: Step, mixer: Attention, queries: int, keys: int, qkv: int) -> tuple[int, int]:
    """The peak from the joint product, of `qkv` bytes, to what attention reads, and what is left: the queries."""
    normed = qkv if mixer.projection_norm_eps is None else qkv + step.wide(queries + keys) + (queries + keys) * FLOAT
    if mixer.head_norm is not None and mixer.head_norm.kind == "layer":
        normed = qkv + 2 * (queries + keys) * FLOAT
    if step.compiled_attention:
        return max(normed, qkv + queries * step.element), queries * step.element
    peak, left = normed, qkv
    turned = 0  # queries and keys apart from qkv
    if mixer.head_norm is not None and mixer.head_norm.kind == "rms":
        peak = max(peak, qkv + _rms_norm(step, queries))
        turned, left = (queries + keys) * step.element, queries * step.element
    if mixer.rope is not None:
        peak = max(peak, qkv + turned + step.wide(queries) + 2 * queries * FLOAT)
        left = queries * step.element
    return peak, left


def _queries_per_kv_head(own: HeadShare, group: int) -> int:
    """The most query heads of this rank that read the same KV head."""
    first = min(group - own.before, len(own.heads))
    return group if len(own.kv_heads) > 2 else max(first, len(own.heads) - first)


def _tile_attention(
    step: Step, group: GroupLayout, spans: int, rows: int, shared: int, kv_heads: int, head_dim: int, parts: int = 2
) -> int:
    """Of `spans` sequences with so many queries each, over keys tile by tile. shared: query heads of one KV head.
    parts: keys and values, or rows that are both."""
    length = max(KEY_TILE, group.block_size)
    heads = shared * kv_heads
    padded_rows, padded_dim = -(-rows * shared // 16) * 16, -(-head_dim // 16) * 16
    matrices = spans * kv_heads
    folded = matrices * padded_rows * padded_dim * FLOAT
    tile = parts * matrices * length * padded_dim * FLOAT
    scores = matrices * padded_rows * length * FLOAT
    gathered = matrices * length * (parts * step.cache.num_bytes(head_dim) + step.cache.scale_bytes)
    table = spans * -(-step.context // group.block_size) * 4
    query = spans * rows * heads * head_dim * step.element
    again = step.context > length  # a second tile meets what the first one left
    inside = max(
        gathered + (scores + folded if again else 0),
        2 * scores + folded if again else scores,
        scores + 3 * folded,
        scores + 2 * folded + spans * rows * heads * head_dim * (FLOAT + step.element),
    )
    return query + 2 * folded + tile + table + inside


def _logits(step: Step, spec: ModelSpec, shard: Shard) -> int:
    """The head, over the rows that are sampled, and their hidden rows.

    As default requests are sampled: on a CPU in the head's dtype, without the float32 copy that adjusted rows need. In
    a tensor-parallel group every rank gathers whole rows; on a CPU its own are chosen from the head's first.
    """
    rows, outer = step.sampled * spec.width, spec.embedding_width or spec.width
    vocabulary = len(shard.vocabulary(spec.vocab_size))
    live = rows * step.element
    normed = 0 if spec.final_norm is None else rows * step.element
    peak, logits = step.head(step.sampled, outer, vocabulary)
    peak = normed + max(peak, logits + (0 if step.on_cpu else step.wide(step.sampled * vocabulary)))
    if shard.grid.tensor > 1:
        count = step.sampled * spec.vocab_size
        whole, wide = count * step.element, 0 if step.on_cpu else step.wide(count)
        peak = max(peak, (2 * logits if step.on_cpu else logits) + whole + max(whole, wide))
    return live + peak
