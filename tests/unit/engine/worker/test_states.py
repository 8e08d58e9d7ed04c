"""The memory for states of linear attention: slots next to the KV cache's blocks, equally many on all ranks."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from serve_llm.common.options.speculative import SpeculativeConfig
from serve_llm.engine.config import KVCacheFormat
from serve_llm.engine.model import delta_net_spec
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.inputs import StepInputs
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.model.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.scheduler.output import ScheduledTokens
from serve_llm.engine.worker import kv_cache
from serve_llm.engine.worker.kv_cache import KVCacheConfig, find_state_sizes
from serve_llm.engine.worker.memory import allocate_cache
from serve_llm.engine.worker.state_progress import StateProgress
from serve_llm.kernels import delta_rule
from serve_llm.kernels.delta_rule import DraftCounts
from support.config import CONFIG

MIXER = GatedDeltaNetSpec(num_heads=6, num_kv_heads=3, key_dim=10, value_dim=11, conv_kernel=4, norm_eps=1e-6)
LINEAR = LayerSpec(MIXER, MLPSpec(97, "silu"), NormSpec("rms", 1e-6))
FULL = replace(LINEAR, attention=AttentionSpec(6, 3, 16, 1.0))
SPEC = ModelSpec("X", 331, 60, 256, (LINEAR, FULL, LINEAR), None, tie_word_embeddings=True)

ONE = ParallelLayout()


def plan(num_bytes: int, grid: ParallelLayout = ONE, rank: int = 0, max_num_seqs: int = 4) -> KVCacheConfig:
    shard = build_shard(SPEC, grid, rank)
    config = replace(CONFIG, max_num_seqs=max_num_seqs)
    return kv_cache.plan_cache(
        SPEC.kv_groups,
        shard.kv_groups(SPEC),
        KVCacheFormat(4),
        8,
        num_bytes,
        max_model_len=64,
        max_chunk=16,
        states=find_state_sizes(SPEC, shard, config),
    )


def test_a_state_is_the_last_inputs_and_a_matrix_per_head() -> None:
    channels = 2 * 3 * 10 + 6 * 11
    assert MIXER.count_state(6, 3) == 3 * channels + 6 * 10 * 16
    assert delta_net_spec.STATE_UNIT == delta_rule.STATE_UNIT
    assert build_shard(SPEC, ParallelLayout(), 0).count_state_bytes(SPEC) == 2 * 4 * MIXER.count_state(6, 3)


def test_a_sequence_has_room_for_its_drafts() -> None:
    channels = 2 * 3 * 10 + 6 * 11
    assert MIXER.count_state(6, 3, 4) == MIXER.count_state(6, 3) + 4 * (channels + 2 * 6)
    shard = build_shard(SPEC, ParallelLayout(), 0)
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    sizes = find_state_sizes(SPEC, shard, replace(CONFIG, speculation=speculation))
    assert sizes is not None
    assert sizes.rank_bytes == sizes.model_bytes == shard.count_state_bytes(SPEC, 4) > shard.count_state_bytes(SPEC)


def chunk(start: int, count: int, num_drafts: int = 0) -> ScheduledTokens:
    return ScheduledTokens(1, start, count, (), True, [], draft_ids=(7,) * num_drafts)


def test_where_a_step_starts_tells_how_many_drafts_were_accepted() -> None:
    states = StateProgress(3)
    inputs = StepInputs(torch.empty(0), torch.empty(0), [], [], ())

    def begin(*chunks: ScheduledTokens) -> DraftCounts | None:
        (call,) = states.begin_step(inputs, chunks, torch.from_numpy).state_calls
        assert call.slots == [one.req_index for one in chunks]
        return call.drafts

    assert begin(chunk(0, 5)) is None
    assert begin(chunk(5, 4, 3)) == DraftCounts([0], [3])  # 1 token, 3 drafts
    assert begin(chunk(8, 3, 2)) == DraftCounts([2], [2])
    assert begin(chunk(9, 1)) is None
    assert begin(chunk(10, 3, 2)) == DraftCounts([0], [2])
    assert begin(chunk(0, 20)) is None  # the index has another sequence
    assert begin(chunk(20, 3, 2)) == DraftCounts([0], [2])
    with pytest.raises(AssertionError, match="a step must start after"):
        begin(chunk(24, 1))


def test_a_step_is_divided_where_snapshots_are_stored() -> None:
    caches = [torch.zeros(4 + 3, 5), torch.zeros(2, 2, 1, 8, 4)]
    caches[0][4 + 2] = 7.0
    states = StateProgress(4, caches, first_snapshot=4)
    lengths = torch.tensor([0, 4, 14, 17]), [4, 26, 12]
    inputs = StepInputs(torch.empty(17), torch.empty(17), lengths[0].tolist(), lengths[1], ())
    steps = [
        ScheduledTokens(0, 0, 4, (), False, []),
        ScheduledTokens(2, 16, 10, (), False, [], restored_snapshot=2, stored_snapshots=((8, 1), (10, 0))),
        ScheduledTokens(1, 9, 3, (), True, []),
    ]
    first, second, third = states.begin_step(inputs, steps, torch.from_numpy).state_calls
    assert caches[0][2].tolist() == [7.0] * 5 and not caches[0][:2].any()
    assert (first.tokens, first.slots, first.query_starts, first.context_lens) == (
        range(12),
        [0, 2],
        [0, 4, 12],
        [4, 24],
    )
    assert (second.tokens, second.slots, second.query_starts, second.context_lens) == (range(12, 14), [2], [0, 2], [26])
    assert (third.tokens, third.slots, third.query_starts, third.context_lens) == (range(14, 17), [1], [0, 3], [12])
    assert [call.snapshot for call in (first, second, third)] == [5, 4, None]


def test_drafts_are_behind_a_snapshot() -> None:
    """Those of the step before are accepted in front of it, and those of this step are not part of a state."""
    states = StateProgress(4, [], first_snapshot=4)
    inputs = StepInputs(torch.empty(4), torch.empty(4), [0, 4], [20], ())
    states.begin_step(inputs, [chunk(10, 4, 3)], torch.from_numpy)
    step = [ScheduledTokens(1, 13, 7, (), True, [], draft_ids=(1, 2), stored_snapshots=((3, 0), (5, 1)))]
    inputs = StepInputs(torch.empty(7), torch.empty(7), [0, 7], [20], ())
    first, second = states.begin_step(inputs, step, torch.from_numpy).state_calls
    assert (first.tokens, first.context_lens, first.drafts) == (range(3), [16], DraftCounts([2], [0]))
    assert (second.tokens, second.context_lens, second.drafts) == (range(3, 7), [20], DraftCounts([0], [2]))


def test_without_a_prefix_cache_there_are_no_snapshots() -> None:
    config = replace(CONFIG, enable_prefix_caching=False)
    sizes = find_state_sizes(SPEC, build_shard(SPEC, ParallelLayout(), 0), config)
    assert sizes is not None and sizes.max_snapshots == 0
    assert plan(10 << 20).num_snapshots == kv_cache.MIN_SNAPSHOTS
    assert plan(10 << 20, max_num_seqs=40).num_snapshots == 40


def test_states_take_at_most_about_as_much_memory_as_blocks() -> None:
    large = plan(10 << 20)
    assert large.num_states == 4
    assert large.num_bytes <= 10 << 20 < large.num_bytes + large.block_bytes
    many = plan(1 << 20, max_num_seqs=1000)
    assert 1 < many.num_states < 1000
    assert many.count_sequences(1000) == many.num_states
    assert many.num_states * many.state_bytes <= many.num_blocks * many.block_bytes + many.state_bytes
    assert many.num_bytes <= 1 << 20


@pytest.mark.parametrize("max_num_seqs", [1, 3, 1000])
def test_no_number_of_bytes_is_exceeded_or_left_over(max_num_seqs: int) -> None:
    empty = plan(0, max_num_seqs=max_num_seqs)
    assert empty.num_blocks == 0
    for num_bytes in range(0, 400_000, 997):
        kv_cache_config = empty.fill(num_bytes)
        assert kv_cache_config.num_blocks == 0 or kv_cache_config.num_bytes <= num_bytes
        if kv_cache_config.num_blocks:
            assert replace(kv_cache_config, num_blocks=kv_cache_config.num_blocks + 1).num_bytes > num_bytes


@pytest.mark.parametrize("grid", [ParallelLayout(2), ParallelLayout(3), ParallelLayout(8), ParallelLayout(1, 3)])
def test_ranks_agree_on_the_number_of_states(grid: ParallelLayout) -> None:
    configs = [plan(1 << 20, grid, rank, max_num_seqs=1000) for rank in range(grid.size)]
    num_blocks = min(one.num_blocks for one in configs)
    agreed = [replace(one, num_blocks=num_blocks) for one in configs]
    assert len({one.num_states for one in agreed}) == 1
    assert all(one.num_bytes <= 1 << 20 for one in agreed)


def test_each_layer_has_its_cache() -> None:
    kv_cache_config = plan(1 << 20)
    shard = build_shard(SPEC, ParallelLayout(), 0)
    counts = {index: shard.count_state(mixer) for index, mixer in shard.list_delta_nets(SPEC).items()}
    caches = allocate_cache(kv_cache_config, shard.kv_groups(SPEC), torch.bfloat16, torch.device("cpu"), counts)
    assert [cache.dtype for cache in caches] == [torch.float32, torch.bfloat16, torch.float32]
    assert caches[0].shape == (kv_cache_config.num_states + kv_cache_config.num_snapshots, MIXER.count_state(6, 3))


def test_the_log_says_how_many_sequences_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        kv_cache.check_capacity(plan(10 << 20), max_model_len=64, max_chunk=16, device="cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "States of linear attention, one for each running sequence: 4 of 0.01 MiB per rank",
        "Snapshots of states, one for each cached prefix: 16 of 0.01 MiB per rank",
        "CPU KV cache size: 256 tokens",
        "Maximum concurrency for 64 tokens per request: 4.00x",
    ]
