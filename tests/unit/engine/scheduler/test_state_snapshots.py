"""Snapshots of states: which prompts store them, which are replaced, and who waits for them."""

from __future__ import annotations

from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.scheduler.block_pool import BlockPool
from serve_llm.engine.scheduler.output import RunnerOutput, ScheduledTokens
from serve_llm.engine.scheduler.prefix_cache import PrefixCache
from serve_llm.engine.scheduler.scheduler import Scheduler
from serve_llm.engine.scheduler.sequence import KVCacheSpec, Sequence
from serve_llm.engine.scheduler.state_snapshots import StateSnapshots

BLOCK = 8


def make_scheduler(num_snapshots: int, num_blocks: int = 100, min_branch_tokens: int = BLOCK) -> Scheduler:
    groups = [KVCacheSpec(BLOCK, None)]
    return Scheduler(
        groups,
        num_blocks,
        max_num_seqs=8,
        max_model_len=200,
        max_chunk=50,
        prefix_caching=True,
        snapshots=StateSnapshots(groups, num_snapshots, min_branch_tokens),
    )


def ids(seed: int, count: int) -> list[int]:
    return [1000 * seed + number for number in range(count)]


def add(scheduler: Scheduler, number: int, prompt_ids: list[int], max_tokens: int = 1, salt: str = "") -> None:
    sampling = Sampling(max_tokens=max_tokens, seed=0)
    scheduler.add(EngineCoreRequest(id=number, prompt_ids=prompt_ids, sampling=sampling, cache_salt=salt), 0.0)


def step(scheduler: Scheduler, budget: int = 200) -> list[ScheduledTokens]:
    output = scheduler.schedule(budget, 0.0)
    scheduler.check_integrity()
    results = [RunnerOutput(token_id=7 if chunk.sample else None) for chunk in output.scheduled]
    scheduler.update_from_output(output, results)
    scheduler.check_integrity()
    return output.scheduled


def run(scheduler: Scheduler, prompt_ids: list[int], salt: str = "") -> list[ScheduledTokens]:
    """Return the steps of a request that is alone."""
    add(scheduler, 0, prompt_ids, salt=salt)
    chunks = []
    while scheduler.has_work:
        chunks += step(scheduler)
    return chunks


def start_of(chunks: list[ScheduledTokens]) -> int:
    assert (chunks[0].restored_snapshot is None) == (chunks[0].start == 0)
    return chunks[0].start


def test_a_prompt_stores_one_at_its_last_boundary() -> None:
    scheduler = make_scheduler(4)
    (first, second) = run(scheduler, ids(1, 60))
    assert (first.stored_snapshots, second.start, second.stored_snapshots) == ((), 50, ((6, 0),))
    (turn,) = run(scheduler, ids(1, 60) + ids(2, 13))
    assert (turn.start, turn.restored_snapshot, turn.stored_snapshots) == (56, 0, ((16, 1),))
    assert start_of(run(scheduler, ids(1, 60) + ids(3, 20))) == 56


def test_the_token_that_samples_is_always_computed() -> None:
    scheduler = make_scheduler(4)
    run(scheduler, ids(1, 24))
    assert start_of(run(scheduler, ids(1, 24))) == 16
    assert start_of(run(scheduler, ids(1, 25))) == 16


def test_short_prompts_store_none() -> None:
    assert [chunk.stored_snapshots for chunk in run(make_scheduler(4), ids(1, 8))] == [()]


def test_the_second_prompt_stores_one_where_it_departs() -> None:
    scheduler = make_scheduler(4)
    run(scheduler, ids(1, 20) + ids(2, 20))
    (chunk,) = run(scheduler, ids(1, 20) + ids(3, 20))
    assert chunk.start == 0
    assert [position for position, _ in chunk.stored_snapshots] == [16, 32]
    assert start_of(run(scheduler, ids(1, 20) + ids(4, 20))) == 16


def test_one_that_saves_little_is_not_stored() -> None:
    scheduler = make_scheduler(4, min_branch_tokens=17)
    run(scheduler, ids(1, 20) + ids(2, 20))
    (chunk,) = run(scheduler, ids(1, 20) + ids(3, 20))
    assert [position for position, _ in chunk.stored_snapshots] == [32]


def test_salts_share_none() -> None:
    scheduler = make_scheduler(4)
    run(scheduler, ids(1, 40), salt="a")
    assert start_of(run(scheduler, ids(1, 40), salt="b")) == 0
    assert start_of(run(scheduler, ids(1, 40), salt="a")) == 32


def test_the_least_recently_used_one_is_replaced() -> None:
    scheduler = make_scheduler(2)
    for seed in (1, 2):
        run(scheduler, ids(seed, 40))
    assert start_of(run(scheduler, ids(1, 40))) == 32
    run(scheduler, ids(3, 40))
    assert start_of(run(scheduler, ids(1, 40))) == 32
    assert start_of(run(scheduler, ids(2, 40))) == 0


def test_one_goes_with_its_block() -> None:
    scheduler = make_scheduler(4, num_blocks=12)
    run(scheduler, ids(1, 40))
    run(scheduler, ids(2, 90))
    assert start_of(run(scheduler, ids(1, 40))) == 0


def test_a_pool_of_one_follows_a_conversation() -> None:
    scheduler = make_scheduler(1)
    prompt = ids(1, 20)
    run(scheduler, prompt)
    for turn in range(2, 6):
        before = (len(prompt) - 1) // BLOCK * BLOCK
        prompt = prompt + ids(turn, 15)
        (chunk,) = run(scheduler, prompt)
        assert (chunk.start, chunk.restored_snapshot) == (before, 0)
        assert chunk.stored_snapshots == (((len(prompt) - 1) // BLOCK * BLOCK - before, 0),)


def test_without_snapshots_all_is_computed() -> None:
    scheduler = make_scheduler(0)
    run(scheduler, ids(1, 40))
    assert start_of(run(scheduler, ids(1, 40))) == 0


def test_equal_prompts_wait_and_others_do_not() -> None:
    scheduler = make_scheduler(4)
    for number in range(3):
        add(scheduler, number, ids(1, 40))
    add(scheduler, 3, ids(2, 40))
    assert [chunk.start for chunk in step(scheduler)] == [0, 0]
    assert [chunk.start for chunk in step(scheduler)] == [32, 32]


def test_those_that_wait_for_an_aborted_prompt_go_on() -> None:
    scheduler = make_scheduler(4)
    for number in range(3):
        add(scheduler, number, ids(1, 60))
    assert [chunk.start for chunk in step(scheduler, budget=30)] == [0]
    scheduler.abort(0)
    scheduler.check_integrity()
    starts = [chunk.start for chunk in step(scheduler)]
    assert starts == [0]
    assert scheduler.num_waiting == 1


def test_running_prompts_keep_theirs() -> None:
    """With every snapshot planned by a running prompt, further prompts store none."""
    scheduler = make_scheduler(1)
    for number in range(2):
        add(scheduler, number, ids(number + 1, 40))
    first, second = step(scheduler)
    assert first.stored_snapshots == ((32, 0),)
    assert second.stored_snapshots == ()
    assert start_of(run(scheduler, ids(1, 40))) == 32


def test_numbers_of_a_requested_step_are_counted_from_its_first_token() -> None:
    scheduler = make_scheduler(4)
    chunks = []
    add(scheduler, 0, ids(1, 40))
    while scheduler.has_work:
        chunks += step(scheduler, budget=20)
    assert [(chunk.start, chunk.stored_snapshots) for chunk in chunks] == [(0, ()), (20, ((12, 0),))]


def test_the_prefix_of_a_snapshot_also_needs_the_blocks_of_windows() -> None:
    groups = (KVCacheSpec(BLOCK, None), KVCacheSpec(BLOCK, 6))
    pool = BlockPool(10)
    snapshots = StateSnapshots(groups, 1, BLOCK)
    cache = PrefixCache(groups, pool, True, snapshots=snapshots)
    request = EngineCoreRequest(id=0, prompt_ids=ids(1, 30), sampling=Sampling(max_tokens=1, seed=0))
    sequence = Sequence(request, groups, 0, 0.0)
    hashes = sequence.block_hashes(BLOCK, 3)
    for key in [*((0, block_hash) for block_hash in hashes), (1, hashes[2])]:
        pool.cache_block(pool.allocate(), key)
    snapshots.begin(sequence, last=16, known=0)
    sequence.num_computed = 16
    snapshots.commit(sequence)
    assert cache.find(sequence) == 0  # the window's block before 16 is not cached
    pool.cache_block(pool.allocate(), (1, hashes[1]))
    assert cache.find(sequence) == 16
