"""Slots of adapters: shared, replaced by age, and never taken from a sequence that waited longer."""

from __future__ import annotations

from serve_llm.common.types import Adapter, Request, Sampling
from serve_llm.engine.scheduler.adapter_slots import AdapterSlots
from serve_llm.engine.scheduler.sequence import Sequence


def build(name: str) -> Sequence:
    """A sequence with the adapter of this name; "": without one."""
    adapter = Adapter(name, f"/{name}", name * 3) if name else None
    request = Request(id=1, prompt_ids=[1], sampling=Sampling(max_tokens=1, seed=0), adapter=adapter)
    return Sequence(request, (), 1, 0.0)


def admit(slots: AdapterSlots, names: str) -> list[Sequence]:
    """Those of the sequences with these adapters that are admitted; a space stands for the base model."""
    admitted = []
    for sequence in slots.list_admissible([build(name.strip()) for name in names]):
        slots.acquire(sequence)
        admitted.append(sequence)
    return admitted


def test_sequences_share_the_slot_of_their_adapter() -> None:
    slots = AdapterSlots(2)
    admitted = admit(slots, "a ab a")
    assert [sequence.adapter_slot for sequence in admitted] == [0, None, 0, 1, None, 0]
    slots.check_integrity(admitted)


def test_nobody_overtakes_a_sequence_that_waits_for_a_slot() -> None:
    slots = AdapterSlots(1)
    running = admit(slots, "a")
    assert [sequence.adapter_digest for sequence in admit(slots, "ba ")] == [""]
    slots.release(running[0])
    assert [sequence.adapter_digest for sequence in admit(slots, "ba ")] == ["bbb", ""]


def test_the_least_recently_used_adapter_makes_room() -> None:
    slots = AdapterSlots(2)
    for sequence in admit(slots, "aba"):
        slots.release(sequence)
    (newest,) = admit(slots, "c")
    assert newest.adapter_slot == 1  # where b was
    (again,) = admit(slots, "a")
    assert again.adapter_slot == 0
    slots.check_integrity([newest, again])


def test_without_slots_nothing_is_acquired() -> None:
    slots = AdapterSlots(0)
    assert [sequence.adapter_slot for sequence in admit(slots, " a ")] == [None, None]
