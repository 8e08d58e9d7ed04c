"""Estimate the memory that the largest step takes in addition to weights and KV cache. Imports no torch.

Follows the parts of a step (`model/*`, `kernels/*`) in order, adds up the tensors that are alive at the same time,
and takes the maximum. Leaves out small vectors (ids, positions, one number per row) and NumPy arrays.

Assumes compiled kernels on a CPU and portable ones on a GPU; a CPU without a compiler takes more. A test compares
the estimate with what torch's profiler sees a real step allocate. Variables are in bytes unless they are counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serve_llm.cli.plan.parameters import FLOAT32_BYTES, UNIT_BYTES, round_up
from serve_llm.engine.config import Config, KVCacheFormat
from serve_llm.engine.model.delta_net_spec import STATE_UNIT, GatedDeltaNetSpec
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import AttentionSpec, LayerSpec, MLASpec, MLPSpec, ModelSpec, MoESpec, NormSpec
from serve_llm.engine.parallel.layout import HeadShare
from serve_llm.engine.scheduler.sequence import KVCacheSpec

ROUTING_BYTES = 20  # per chosen expert: its weight, its number and its position in the order of the experts
KEY_TILE = 128  # keys per tile, as in `kernels.attention`
QUERY_TILE = 64
MAX_EXPERT_ROWS = 1024  # up to which a CPU multiplies the rows of all experts in one call
# Head sizes with compiled attention, which allocates only its result, as in `kernels.cpu.library`.
COMPILED_HEAD_DIMS = range(16, 257, 8)
COMPILED_LATENT_DIMS = range(16, 1025, 8)
# Float32 copies alive at the same time in the portable activation kernels.
FLOAT32_COPIES = {"silu": 2, "gelu": 3, "gelu_tanh": 4, "relu": 0, "relu2": 0, "swigluoai": 3}


@dataclass(frozen=True)
class LargestStep:
    """The largest step."""

    tokens: int
    singles: int  # tokens that are the only one of their sequence
    sampled: int  # rows of logits
    context: int  # tokens of the longest sequence
    element: int  # bytes of the model's dtype
    on_cpu: bool
    cache_format: KVCacheFormat
    is_8_bit: bool = False  # the linear layers inside layers
    compiled_attention: bool = False  # a CPU has the other compiled kernels in any case

    @classmethod
    def from_config(cls, config: Config, element: int) -> LargestStep:
        """On a CPU, all sequences decode and as few prompts as possible take the remaining tokens; on a GPU, the step
        with which `Worker` measures its memory."""
        if config.device == "cuda":
            tokens = min(config.max_num_batched_tokens, config.max_model_len - 1)
            sampled = min(config.max_num_seqs, tokens)
            return cls(tokens, 0, sampled, config.max_model_len, element, False, config.kv_cache_format)
        tokens = min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)
        sequences = min(config.max_num_seqs, tokens)
        prompts = -(-(tokens - sequences) // max(config.max_model_len - 1, 1))
        return cls(tokens, sequences - prompts, sequences, config.max_model_len, element, True, config.kv_cache_format)

    def float32_copy(self, elements: int) -> int:
        """0 if the model computes in float32 anyway."""
        return elements * FLOAT32_BYTES if self.element != FLOAT32_BYTES else 0

    def linear(self, rows: int, inputs: int, outputs: int) -> tuple[int, int]:
        """The peak of a linear layer inside a layer, including its result, and the result alone."""
        return (self.linear_8_bit if self.is_8_bit else self.plain_linear)(rows, inputs, outputs)

    def linear_8_bit(self, rows: int, inputs: int, outputs: int) -> tuple[int, int]:
        """The same for a linear layer whose input is quantised."""
        result = rows * outputs * self.element
        quantised = rows * inputs
        return result + quantised + _pad_rows(rows, inputs, 1), result

    def plain_linear(self, rows: int, inputs: int, outputs: int) -> tuple[int, int]:
        """The same for a linear layer in the model's dtype."""
        result = rows * outputs * self.element
        return result + (_pad_rows(rows, inputs, self.element) if self.on_cpu else 0), result


def _pad_rows(rows: int, inputs: int, element: int) -> int:
    """The copy that `kernels.cpu.linear` makes if a row is not a whole number of units."""
    row = round_up(inputs * element, UNIT_BYTES)
    return rows * row if row != inputs * element else 0


def peak_bytes(spec: ModelSpec, shard: Shard, groups: tuple[KVCacheSpec, ...], config: Config, element: int) -> int:
    """The peak on the shard's rank. groups: of the KV cache. element: bytes of the model's dtype."""
    step = LargestStep.from_config(config, element)
    is_compiled = step.on_cpu and all(
        group.head_dim in (COMPILED_LATENT_DIMS if group.is_latent else COMPILED_HEAD_DIMS) for group in spec.kv_groups
    )
    rounds_stored = not step.on_cpu and spec.grouped is not None and spec.grouped.rounds_inputs
    is_8_bit = spec.int8 is not None or spec.fp8 or rounds_stored
    step = replace(step, is_8_bit=is_8_bit, compiled_attention=is_compiled)
    last_layer = len(spec.layers) - 1
    group_of = {
        index: group for group, kv_group in zip(groups, spec.kv_groups, strict=True) for index in kv_group.layers
    }
    kinds = {
        (spec.layers[index], group_of.get(index, groups[0]), step.sampled if index == last_layer else step.tokens)
        for index in shard.layers
    }
    ropes = {
        (layer.attention.rope, layer.attention.rope_dim) for layer, *_ in kinds if layer.attention.rope is not None
    }
    angles = sum(step.tokens * rope_dim * FLOAT32_BYTES for _, rope_dim in ropes)
    peak = max(
        angles + _layer_peak(step, layer, group, spec.hidden_size, shard, ffn_tokens)
        for layer, group, ffn_tokens in kinds
    )
    return max(peak, _logits_peak(step, spec, shard)) if shard.is_last else peak


def _layer_peak(
    step: LargestStep, layer: LayerSpec, group: KVCacheSpec, hidden_size: int, shard: Shard, ffn_tokens: int
) -> int:
    """ffn_tokens: tokens for which the feed-forward half is computed; in the last layer, only those that are sampled.
    (This does not count prompts whose log-probabilities are requested, where it is all tokens.)"""
    row = hidden_size * step.element
    norm_position = layer.norm_position
    # The decoder keeps the hidden states from before the layer, and their norm if any, until the layer is done.
    copies = 1 if norm_position in ("post", "output") else 2
    hidden = copies * step.tokens * row
    if isinstance(layer.attention, MLASpec):
        num_heads = len(shard.attention(layer.attention).heads)
        attention_peak = _mla_peak(step, layer.attention, group, hidden_size, num_heads)
    elif isinstance(layer.attention, GatedDeltaNetSpec):
        attention_peak = _delta_net_peak(step, layer.attention, hidden_size, shard)
    else:
        attention_peak = _attention_peak(step, layer.attention, group, hidden_size, shard)
    attention_output = step.tokens * row
    selected = 2 * ffn_tokens * row if ffn_tokens < step.tokens else 0  # the rows of hidden states and attention output
    output_norm = ffn_tokens * row if norm_position in ("output", "sandwich") else 0
    residual = ffn_tokens * row + output_norm + _add_and_norm_peak(step, layer.norm, ffn_tokens * hidden_size)
    ffn_input = (1 if norm_position == "parallel" else copies) * ffn_tokens * row
    if isinstance(layer.ffn, MLPSpec):
        ffn_peak = _mlp_peak(step, layer.ffn, hidden_size, len(shard.ffn(layer.ffn)), ffn_tokens)
    else:
        ffn_peak = _moe_peak(step, layer.ffn, hidden_size, shard, ffn_tokens)
    return hidden + max(
        attention_peak,
        attention_output + selected,
        (selected or attention_output) + residual,
        ffn_input + ffn_peak,
    )


def _add_and_norm_peak(step: LargestStep, norm: NormSpec, elements: int) -> int:
    """The bytes of the sum of two tensors and its norm, without the two tensors. elements: of each tensor."""
    size = elements * step.element
    if norm.kind == "layer":
        return 2 * size
    return size if step.on_cpu else size + _rms_norm_peak(step, elements)


def _rms_norm_peak(step: LargestStep, elements: int) -> int:
    """A norm in torch operations, including its result."""
    return step.float32_copy(elements) + elements * FLOAT32_BYTES + elements * step.element


def _mlp_peak(
    step: LargestStep, mlp: MLPSpec, hidden_size: int, intermediate_size: int, rows: int, freed_input: int = 0
) -> int:
    """intermediate_size: of this rank. freed_input: bytes of the input, if it is freed after the first linear layer."""
    up_peak, up = step.linear(rows, hidden_size, intermediate_size * (2 if mlp.gated else 1))
    elements = rows * intermediate_size
    active = elements * step.element
    float32 = FLOAT32_COPIES[mlp.activation] * elements * FLOAT32_BYTES
    if mlp.activation == "swigluoai":  # has no compiled kernel
        activation = float32 + (active if step.element != FLOAT32_BYTES else 0)
    elif step.on_cpu or not float32:
        activation = active
    else:
        activation = step.float32_copy(elements) + float32
    down_peak, _ = step.linear(rows, intermediate_size, hidden_size)
    return max(freed_input + up_peak, up + activation, active + down_peak)


def _moe_peak(step: LargestStep, moe: MoESpec, hidden_size: int, shard: Shard, rows: int) -> int:
    """The worst case, in which one expert gets all tokens, including those of other expert-parallel engines.

    A CPU with many rows, or a GPU in 8 bits, computes one expert at a time; otherwise, all experts together.
    """
    output = rows * hidden_size * step.element
    float32_output = step.float32_copy(rows * hidden_size)
    top_k = moe.router.top_k
    engines = shard.engines
    num_experts = len(shard.experts(moe))
    intermediate_size = len(shard.expert_columns(moe)) if num_experts else 0
    outputs_per_token = top_k if engines == 1 else min(top_k, num_experts) * engines
    expert_outputs = outputs_per_token * output
    if step.on_cpu or step.is_8_bit:
        expert_peak = 0
        if intermediate_size:
            expert_peak = _mlp_peak(step, moe.expert, hidden_size, intermediate_size, engines * rows, engines * output)
        peak = expert_outputs + max(expert_peak, 2 * float32_output or output)
        if step.on_cpu and intermediate_size:
            together = min(outputs_per_token * rows, MAX_EXPERT_ROWS)
            inputs = together * hidden_size * step.element
            together_peak = _mlp_peak(step, moe.expert, hidden_size, intermediate_size, together, inputs)
            peak = max(peak, together_peak, 2 * inputs)
    else:
        experts_peak = _mlp_peak(step, moe.expert, hidden_size, intermediate_size, outputs_per_token * rows)
        peak = max(experts_peak, expert_outputs + output)
    if engines > 1:
        sent = top_k * output  # rows for the experts of all engines; the same number of results returns
        peak = max(expert_outputs + peak, sent + expert_outputs, 3 * sent)
    peak += top_k * rows * ROUTING_BYTES
    if moe.router.scales_inputs:
        peak += output
    if moe.shared_expert is None:
        return peak
    shared_size = len(shard.ffn(moe.shared_expert))
    shared_peak = _mlp_peak(step, moe.shared_expert, hidden_size, shared_size, rows)
    gated = output + 2 * float32_output if moe.shared_expert_gate else output
    return max(peak, output + max(shared_peak, gated + output))


def _mla_peak(step: LargestStep, mla: MLASpec, group: KVCacheSpec, hidden_size: int, num_heads: int) -> int:
    tokens = step.tokens
    if num_heads == 0:
        return step.linear(tokens, 0, hidden_size)[0]
    q_rank = mla.q_lora_rank
    q_size = num_heads * (mla.qk_nope_head_dim + mla.rope_dim)
    peak, live = step.linear(tokens, hidden_size, (q_size if q_rank is None else q_rank) + mla.head_dim)
    if q_rank is not None:
        normed = tokens * q_rank * step.element
        up_peak, up = step.linear(tokens, q_rank, q_size)
        peak = max(peak, live + 2 * normed, live + normed + up_peak)
        live += up
    rotary_elements = tokens * num_heads * mla.rope_dim
    rotary = rotary_elements * step.element
    rope_peak = step.float32_copy(rotary_elements) + 2 * rotary_elements * FLOAT32_BYTES
    keys_peak = tokens * mla.head_dim * step.element + _rms_norm_peak(step, tokens * mla.kv_lora_rank)
    absorbed = tokens * num_heads * mla.kv_lora_rank * step.element  # queries multiplied by the key up-projection
    query = absorbed + rotary
    peak = max(peak, live + rope_peak, live + rotary + keys_peak, live + rotary + absorbed + query)
    mixed = absorbed
    tile = 0
    if not step.compiled_attention:
        mixed = query  # whole latent rows; the values are part of them
        tile = _tile_peak(step, group, 1, min(tokens - step.singles, QUERY_TILE), num_heads, 1, mla.head_dim, parts=1)
        if step.singles:
            tile = max(tile, _tile_peak(step, group, step.singles, 1, num_heads, 1, mla.head_dim, parts=1))
    values = tokens * num_heads * mla.v_head_dim * step.element
    output_peak, _ = step.linear(tokens, num_heads * mla.v_head_dim, hidden_size)
    return max(peak, query + mixed + tile, mixed + values + output_peak)


def _delta_net_peak(step: LargestStep, mixer: GatedDeltaNetSpec, hidden_size: int, shard: Shard) -> int:
    """The peak of the compiled kernel on a CPU. On a GPU, which computes a sequence's tokens one after the other, the
    peak of a sequence that takes the whole step."""
    head_share = shard.attention(mixer)
    tokens = step.tokens
    heads = len(head_share.heads)
    key_heads = len(head_share.kv_heads)
    values = tokens * heads * mixer.value_dim
    output_peak, _ = step.linear(tokens, heads * mixer.value_dim, hidden_size)
    if heads == 0:
        return output_peak
    channels = mixer.count_channels(heads, key_heads)
    inputs_peak, inputs = step.linear(tokens, hidden_size, channels + heads * mixer.value_dim)
    all_gates_peak, all_gates = step.plain_linear(tokens, hidden_size, 2 * mixer.num_heads)
    own_gates = tokens * 2 * heads * step.element if heads < mixer.num_heads else 0
    gates_peak = max(all_gates_peak, all_gates + own_gates)
    mixed = values * step.element
    row = -(-mixer.value_dim // STATE_UNIT) * STATE_UNIT
    scratch = tokens * (2 * key_heads * mixer.key_dim + heads * row + 2 * heads) * FLOAT32_BYTES
    if not step.on_cpu:
        scratch = tokens * (3 * channels + 2 * heads * mixer.key_dim + 4 * heads) * FLOAT32_BYTES
    rule_peak = (own_gates or all_gates) + scratch + mixed
    normed = values * FLOAT32_BYTES
    gate_peak = mixed + step.float32_copy(values) + 3 * normed
    gated_peak = 2 * mixed + normed + output_peak
    return max(inputs_peak, inputs + max(gates_peak, rule_peak, gate_peak, gated_peak))


def _attention_peak(
    step: LargestStep, attention: AttentionSpec, group: KVCacheSpec, hidden_size: int, shard: Shard
) -> int:
    head_share = shard.attention(attention)
    num_heads = len(head_share.heads)
    num_kv_heads = len(head_share.kv_heads)
    head_dim = attention.head_dim
    q_elements = step.tokens * num_heads * head_dim
    k_elements = step.tokens * num_kv_heads * head_dim
    qkv_peak, qkv = step.linear(step.tokens, hidden_size, (num_heads + 2 * num_kv_heads) * head_dim)
    rope_peak, query = _norm_and_rope_peak(step, attention, q_elements, k_elements, qkv)
    if attention.query_temperature is not None and step.on_cpu:  # queries are multiplied in float32
        rope_peak = max(rope_peak, query + 2 * step.float32_copy(q_elements))
    group_heads = _max_heads_per_kv_head(head_share, attention.num_heads // attention.num_kv_heads)
    # The output, and the queries padded to the same number of heads for every KV head.
    padded_elements = step.tokens * group_heads * num_kv_heads * head_dim
    live = query + padded_elements * step.element * (1 if padded_elements == q_elements else 2)
    output_peak, _ = step.linear(step.tokens, num_heads * head_dim, hidden_size)
    inner_peak = output_peak
    if attention.output_gate and num_heads:
        gate_peak, gate = step.linear(step.tokens, hidden_size, num_heads * head_dim)
        inner_peak = max(inner_peak, gate_peak, gate + step.float32_copy(q_elements) + q_elements * FLOAT32_BYTES)
    if not step.compiled_attention:
        prompt_rows = min(step.tokens - step.singles, QUERY_TILE)
        if attention.chunked and attention.sliding_window is not None:
            prompt_rows = min(prompt_rows, attention.sliding_window)
            step = replace(step, context=min(step.context, attention.sliding_window))
        inner_peak = max(inner_peak, _tile_peak(step, group, 1, prompt_rows, group_heads, num_kv_heads, head_dim))
        if step.singles:
            inner_peak = max(inner_peak, _tile_peak(step, group, step.singles, 1, group_heads, num_kv_heads, head_dim))
        if step.cache_format.scale_bytes:  # while values are quantised, the quantised keys are alive
            quantised = step.tokens * num_kv_heads * 2 * step.cache_format.num_bytes(head_dim)
            copies = step.float32_copy(k_elements) + k_elements * (FLOAT32_BYTES + 1)
            inner_peak = max(inner_peak, copies + quantised)
    return max(qkv_peak, rope_peak, live + inner_peak)


def _norm_and_rope_peak(
    step: LargestStep, attention: AttentionSpec, q_elements: int, k_elements: int, qkv: int
) -> tuple[int, int]:
    """The peak between the QKV projection and attention, and the bytes that hold the queries afterwards."""
    elements = q_elements + k_elements
    query = q_elements * step.element
    peak = qkv
    if attention.qk_projection_norm is not None:
        peak = qkv + step.float32_copy(elements) + elements * FLOAT32_BYTES
    norm_kind = attention.qk_norm.kind if attention.qk_norm is not None else None
    if norm_kind == "layer":
        peak = qkv + 2 * elements * FLOAT32_BYTES
    if step.compiled_attention:
        return max(peak, qkv + query), query
    live = qkv  # the queries are a view of the QKV projection
    normed = 0
    if norm_kind == "rms":
        peak = max(peak, qkv + _rms_norm_peak(step, q_elements))
        normed = elements * step.element
        live = query
    if attention.rope is not None:
        peak = max(peak, qkv + normed + step.float32_copy(q_elements) + 2 * q_elements * FLOAT32_BYTES)
        live = query
    return peak, live


def _max_heads_per_kv_head(own: HeadShare, group_size: int) -> int:
    """The largest number of this rank's query heads that share a KV head."""
    first = min(group_size - own.before, len(own.heads))
    return group_size if len(own.kv_heads) > 2 else max(first, len(own.heads) - first)


def _tile_peak(
    step: LargestStep,
    group: KVCacheSpec,
    sequences: int,
    rows: int,
    group_heads: int,
    kv_heads: int,
    head_dim: int,
    parts: int = 2,
) -> int:
    """Portable attention of `sequences` with `rows` queries each, over one tile of keys.

    group_heads: query heads per KV head. parts: 2 for keys and values, 1 for latent rows that are both.
    """
    tile_length = max(KEY_TILE, group.block_size)
    matrices = sequences * kv_heads
    query_elements = sequences * rows * group_heads * kv_heads * head_dim
    padded_rows = round_up(rows * group_heads, 16)
    padded_dim = round_up(head_dim, 16)
    folded = matrices * padded_rows * padded_dim * FLOAT32_BYTES  # queries, and sums of the same size
    tile = parts * matrices * tile_length * padded_dim * FLOAT32_BYTES
    scores = matrices * padded_rows * tile_length * FLOAT32_BYTES
    gathered = matrices * tile_length * (parts * step.cache_format.num_bytes(head_dim) + step.cache_format.scale_bytes)
    block_table = sequences * -(-step.context // group.block_size) * 4
    peak = max(
        gathered,
        scores + 3 * folded,
        scores + 2 * folded + query_elements * (FLOAT32_BYTES + step.element),
    )
    if step.context > tile_length:  # during a second tile, the scores and sums of the first are still alive
        peak = max(peak, gathered + scores + folded, 2 * scores + folded)
    return query_elements * step.element + 2 * folded + tile + block_table + peak


def _logits_peak(step: LargestStep, spec: ModelSpec, shard: Shard) -> int:
    """The head over the sampled rows, and their hidden states, for requests with default sampling parameters.

    On a CPU, logits stay in the head's dtype; penalties and the like would need a float32 copy. In a tensor-parallel
    group, every rank gathers whole rows; on a CPU, its own rows are selected before that.
    """
    hidden = step.sampled * spec.hidden_size * step.element
    normed = 0 if spec.final_norm is None else hidden
    vocabulary = len(shard.vocabulary(spec.vocab_size))
    head = step.linear_8_bit if spec.int8_lm_head else step.plain_linear
    head_peak, logits = head(step.sampled, spec.embedding_size or spec.hidden_size, vocabulary)
    float32_logits = 0 if step.on_cpu else step.float32_copy(step.sampled * vocabulary)
    peak = normed + max(head_peak, logits + float32_logits)
    if shard.layout.tp_size > 1:
        elements = step.sampled * spec.vocab_size
        gathered = elements * step.element
        float32_gathered = 0 if step.on_cpu else step.float32_copy(elements)
        own_logits = 2 * logits if step.on_cpu else logits
        peak = max(peak, own_logits + gathered + max(gathered, float32_gathered))
    return hidden + peak
