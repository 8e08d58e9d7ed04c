"""Blocks that leave the device under random loads: wherever blocks are, and however slow and unreliable the store is,
no sequence reads the keys of another prefix, and the store and the ranks never use a slot at the same time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_llm.common.types import EngineCoreRequest, OffloadStats, Sampling
from serve_llm.engine.scheduler.block_pool import BlockKey
from serve_llm.engine.scheduler.offload import FinishedTransfer, OffloadManager
from serve_llm.engine.scheduler.scheduler import Scheduler
from support.scheduling import FULL, Arrival, FakeWorkers, Load, drive, loads

GARBAGE: dict[tuple[int, int], object] = {}


class FakeStore:
    """Reads and writes slots of fake workers. A transfer takes `delay` exchanges; the blocks whose hash begins with a
    byte below `broken` cannot be read."""

    def __init__(self, workers: FakeWorkers, delay: int, broken: int) -> None:
        self.workers, self.delay, self.broken = workers, delay, broken
        self.stats = OffloadStats()
        self.read_seconds: float | None = None
        self.is_open = True
        self.blocks: dict[BlockKey, dict] = {}
        self.under_way: list[tuple[int, bool, BlockKey, int, dict]] = []  # final step, and the slot's content
        self.now = 0
        self.num_reads = 0

    def has(self, key: BlockKey) -> bool:
        return key in self.blocks

    def start_read(self, key: BlockKey, slot: int) -> None:
        self.workers.host[slot] = GARBAGE
        self.num_reads += 1
        self.under_way.append((self.now + self.delay, True, key, slot, GARBAGE))

    def start_write(self, key: BlockKey, slot: int) -> None:
        self.under_way.append((self.now + self.delay, False, key, slot, self.workers.host[slot]))

    def take_finished(self) -> list[FinishedTransfer]:
        self.now += 1
        finished = []
        for transfer in list(self.under_way):
            end, is_read, key, slot, content = transfer
            if end > self.now:
                continue
            self.under_way.remove(transfer)
            assert self.workers.host[slot] is content, "the slot was used meanwhile"
            is_complete = key[1][0] >= self.broken
            if is_read:
                self.workers.host[slot] = dict(self.blocks[key]) if is_complete else GARBAGE
            else:
                self.blocks[key] = content
            finished.append(FinishedTransfer(key, is_read, is_complete))
        return finished


requests = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=30), st.integers(1, 12), st.integers(0, 30), st.booleans()
)


@settings(max_examples=120)
@given(
    st.lists(requests, min_size=1, max_size=14),
    loads,
    st.integers(0, 24),  # slots
    st.booleans(),  # whether there is a store
    st.integers(0, 4),  # exchanges per transfer
    st.sampled_from([0, 0, 64, 256]),  # first bytes of hashes below this cannot be read
)
def test_random_loads(specs, load: Load, num_slots: int, has_store: bool, delay: int, broken: int) -> None:
    arrivals = []
    for number, (prompt, max_tokens, step, is_aborted) in enumerate(specs):
        sampling = Sampling(max_tokens=max_tokens, seed=0, stop_token_ids=(7,))
        arrivals.append(Arrival(EngineCoreRequest(id=number, prompt_ids=prompt, sampling=sampling), step, is_aborted))
    workers = FakeWorkers(load.groups, load.long_rope_threshold)
    store = FakeStore(workers, delay, broken) if has_store else None
    offload = OffloadManager(num_slots, store=store)
    load.run(load.build_scheduler(offload=offload), arrivals, workers, offload)


def make(num_slots: int, broken: int = 0) -> tuple[Scheduler, FakeWorkers, FakeStore, OffloadManager]:
    """Build a scheduler with 6 blocks of 4 tokens."""
    workers = FakeWorkers(FULL)
    store = FakeStore(workers, 2, broken)
    offload = OffloadManager(num_slots, block_bytes=10, store=store)
    scheduler = Scheduler(FULL, 6, max_num_seqs=4, max_model_len=40, max_chunk=40, prefix_caching=True, offload=offload)
    return scheduler, workers, store, offload


def compute(scheduler: Scheduler, workers: FakeWorkers, offload: OffloadManager, start: int) -> int | None:
    """Run a request of 17 prompt tokens, and let the store write. Returns how many were cached."""
    prompt = list(range(start, start + 17))
    request = EngineCoreRequest(id=start, prompt_ids=prompt, sampling=Sampling(max_tokens=1, seed=0))
    [output] = drive(scheduler, workers, {0: [(request, False)]}, 40, 1, offload=offload)[start]
    for _ in range(20):
        offload.exchange()
    return output.cached_tokens


def test_blocks_come_back_from_memory_and_from_the_store() -> None:
    scheduler, workers, store, offload = make(num_slots=8)
    for start in (100, 200, 300, 400):
        assert compute(scheduler, workers, offload, start) == 0
    assert compute(scheduler, workers, offload, 300) == 16
    memory, disk = offload.read_stats()
    assert (memory.num_blocks, memory.num_bytes, store.num_reads) == (8, 80, 0)
    assert memory.num_hits >= 2 and memory.num_evicted and memory.stored_bytes == 10 * memory.num_stored
    assert compute(scheduler, workers, offload, 100) == 16
    assert store.num_reads and disk is store.stats


def test_what_cannot_be_read_is_computed() -> None:
    scheduler, workers, store, offload = make(num_slots=8, broken=256)
    for start in (100, 200, 300, 400):
        compute(scheduler, workers, offload, start)
    assert compute(scheduler, workers, offload, 100) < 16 and store.num_reads


def test_what_is_slower_than_computing_is_computed() -> None:
    scheduler, workers, store, offload = make(num_slots=8)
    for start in (100, 200, 300, 400):
        compute(scheduler, workers, offload, start)
    store.read_seconds, offload.seconds_per_token = 4.1, 1.0
    compute(scheduler, workers, offload, 100)
    assert store.num_reads == 0
    store.read_seconds = 3.9
    assert compute(scheduler, workers, offload, 200) == 16 and store.num_reads
    slow = OffloadManager(8, copy_seconds=4.1)
    slow.seconds_per_token = 1.0
    assert not slow.is_memory_faster(0.25) and slow.is_memory_faster(0.2)


def test_a_store_that_seems_slow_is_tried_now_and_then() -> None:
    _, _, store, offload = make(num_slots=8)
    store.read_seconds, offload.seconds_per_token = 100.0, 1.0
    assert sum(offload.is_store_faster(0.25) for _ in range(96)) == 3


def test_others_are_computed_while_a_sequence_waits_for_the_store() -> None:
    scheduler, workers, store, offload = make(num_slots=8)
    for start in (100, 200, 300, 400):
        compute(scheduler, workers, offload, start)
    store.delay = 20
    sampling = Sampling(max_tokens=1, seed=0)
    first = EngineCoreRequest(id=1, prompt_ids=list(range(100, 117)), sampling=sampling)
    second = EngineCoreRequest(id=2, prompt_ids=[7] * 5, sampling=sampling)
    scheduler.add(first, 0.0)
    scheduler.add(second, 0.0)
    offload.exchange()
    batch = scheduler.schedule(40, 0.0)
    assert [new.token_ids for new in batch.new_requests] == [second.prompt_ids] and store.num_reads
    scheduler.update_from_output(batch, workers.execute(batch))
    steps = 0
    while scheduler.has_work:
        steps += 1
        offload.exchange()
        batch = scheduler.schedule(40, 0.0)
        if batch.scheduled:
            scheduler.update_from_output(batch, workers.execute(batch))
    assert steps >= store.delay and [new.token_ids for new in batch.new_requests] == [first.prompt_ids]
