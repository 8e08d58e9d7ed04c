"""Adapter slots: shared, replaced by age, and passed on in turns."""

from __future__ import annotations

from serve_llm.common.types import Adapter, EngineCoreRequest, Sampling
from serve_llm.engine.scheduler.adapter_slots import AdapterSlots
from serve_llm.engine.scheduler.sequence import Sequence


def build(name: str, priority: int = 0) -> Sequence:
    """Build a sequence with the adapter of this name; "": without one."""
    adapter = Adapter(name, f"/{name}", name * 3) if name else None
    sampling = Sampling(max_tokens=1, seed=0)
    request = EngineCoreRequest(id=1, prompt_ids=[1], sampling=sampling, adapter=adapter, priority=priority)
    return Sequence(request, (), 1, 0.0)


def admit(slots: AdapterSlots, names: str) -> list[Sequence]:
    """Return the sequences that are admitted, of those with these adapters; a space stands for the base model."""
    admitted = []
    for sequence in slots.list_admissible([build(name.strip()) for name in names]):
        slots.acquire(sequence)
        slots.count_step([])
        admitted.append(sequence)
    return admitted


def test_a_step_loads_two_adapters_at_most() -> None:
    slots = AdapterSlots(3)
    first, second, third = build("a"), build("b"), build("c")
    slots.acquire(first)
    slots.acquire(second)
    assert slots.has_room(build("a")) and not slots.has_room(third)
    slots.count_step([first, second])
    assert slots.has_room(third)


def test_sequences_share_the_slot_of_their_adapter() -> None:
    slots = AdapterSlots(2)
    admitted = admit(slots, "a ab a")
    assert [sequence.adapter_slot for sequence in admitted] == [0, None, 0, 1, None, 0]
    slots.check_integrity(admitted)


def test_sequences_whose_adapter_is_there_overtake_one_that_waits_for_a_slot() -> None:
    slots = AdapterSlots(1)
    running = admit(slots, "a")
    more = admit(slots, "ba ")
    assert [sequence.adapter_digest for sequence in more] == ["aaa", ""]
    assert slots.num_deferred == 1
    for sequence in [*running, *more]:
        slots.release(sequence)
    assert [sequence.adapter_digest for sequence in admit(slots, "ba")] == ["bbb"]


def test_a_free_slot_is_for_the_adapter_that_waited_longest() -> None:
    slots = AdapterSlots(1)
    (running,) = admit(slots, "a")
    slots.claim([build("b")])
    slots.claim([build("c"), build("b")])
    slots.release(running)
    assert [sequence.adapter_digest for sequence in admit(slots, "cb")] == ["bbb"]


def test_a_free_slot_is_not_kept_for_an_adapter_whose_sequences_cannot_be_admitted() -> None:
    slots = AdapterSlots(1)
    (running,) = admit(slots, "a")
    slots.claim([build("b"), build("c")])
    slots.release(running)
    offered = slots.list_admissible([build("c"), build("b")])
    assert [sequence.adapter_digest for sequence in offered] == ["bbb", "ccc"]  # neither is admitted


def count_steps(slots: AdapterSlots, sequences: list[Sequence], number: int) -> None:
    for _ in range(number):
        slots.count_step(sequences)


def test_a_slot_is_closed_when_a_turn_is_over() -> None:
    slots = AdapterSlots(2)
    one, other = admit(slots, "ab")
    waiting = slots.claim([build("c")])
    assert waiting is not None
    count_steps(slots, [one, other], slots.TURN - 1)
    assert slots.close(waiting, [one, other]) == []
    count_steps(slots, [other], 1)
    assert slots.close(waiting, [one, other]) == [other]
    assert [sequence.adapter_digest for sequence in admit(slots, "ba")] == ["aaa"]


def test_prompts_are_finished_before_a_slot_is_given_up() -> None:
    slots = AdapterSlots(1)
    (one,) = admit(slots, "a")
    one.token_ids += [1, 2]  # tokens to compute
    waiting = slots.claim([build("b")])
    assert waiting is not None
    count_steps(slots, [one], slots.TURN)
    assert slots.close(waiting, [one]) == []
    assert not slots.has_room(build("a"))  # others wait, so that the prompts can finish
    one.num_scheduled = 2
    assert slots.close(waiting, [one]) == [one]


def test_an_adapter_that_gave_up_its_slot_takes_no_other_at_once() -> None:
    slots = AdapterSlots(1)
    (one,) = admit(slots, "a")
    waiting = slots.claim([build("b")])
    assert waiting is not None
    count_steps(slots, [one], slots.TURN)
    assert slots.close(waiting, [one]) == [one]
    slots.release(one)
    (other,) = admit(slots, "ba")
    count_steps(slots, [other], slots.TURN - 2)
    assert slots.claim([one]) is None
    count_steps(slots, [other], 2)
    assert slots.claim([one]) is one


def test_a_turn_goes_on_while_requests_follow_each_other() -> None:
    slots = AdapterSlots(1)
    (one,) = admit(slots, "a")
    waiting = slots.claim([build("b")])
    assert waiting is not None
    for _ in range(slots.TURN):
        slots.release(one)
        slots.acquire(one)
    assert slots.close(waiting, [one]) == [one]


def test_a_lower_priority_ends_no_turn() -> None:
    slots = AdapterSlots(1)
    (one,) = admit(slots, "a")
    count_steps(slots, [one], slots.TURN)
    waiting = slots.claim([build("b", priority=1)])
    assert waiting is not None
    assert slots.close(waiting, [one]) == []


def test_the_least_recently_used_adapter_makes_room() -> None:
    slots = AdapterSlots(2)
    for sequence in admit(slots, "aba"):
        slots.release(sequence)
    (newest,) = admit(slots, "c")
    assert newest.adapter_slot == 1  # the slot that b had
    (again,) = admit(slots, "a")
    assert again.adapter_slot == 0
    slots.check_integrity([newest, again])


def test_without_slots_nothing_is_acquired() -> None:
    slots = AdapterSlots(0)
    assert [sequence.adapter_slot for sequence in admit(slots, " a ")] == [None, None]
