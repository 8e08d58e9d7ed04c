"""Grammar masks are filled while a step is computed, and a costly mask delays only its own request."""

from __future__ import annotations

import threading

import pytest

from serve_llm.common.types import FinishReason
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.scheduler.output import MaskSource, SchedulerOutput
from serve_llm.engine.structured_output.masks import MaskFiller
from serve_llm.engine.structured_output.state import ConstraintState
from support.engine import generate, make_engine
from support.gpu_path import make_gpu_engine
from support.grammars import compile_grammar, constrained, demo, text_of

OPTIONS: dict[str, object] = {
    "dtype": "float32",
    "max_model_len": 256,
    "kv_cache_memory": "16MiB",
    "speculative_config": "none",  # masks of drafts are filled in threads
}


@pytest.fixture(scope="module")
def engine() -> EngineCore:
    return make_engine(demo(), enforce_eager=True, **OPTIONS)


def watch_steps(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the order in which hidden states are computed and masks are requested."""
    events: list[str] = []
    runner = engine._executor._worker._runner  # type: ignore[attr-defined]
    forward = runner._forward
    execute = engine._executor.execute

    def watched_forward(*args: object) -> object:
        events.append("forward")
        return forward(*args)

    def watched_execute(scheduler_output: SchedulerOutput, masks: MaskSource | None = None) -> object:
        def watched_masks() -> bytes:
            events.append("masks")
            assert masks is not None
            return masks()

        return execute(scheduler_output, None if masks is None else watched_masks)

    monkeypatch.setattr(runner, "_forward", watched_forward)
    monkeypatch.setattr(engine._executor, "execute", watched_execute)
    return events


def test_only_sampling_waits_for_masks(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    events = watch_steps(engine, monkeypatch)
    generate(engine, [constrained(1, compile_grammar(regex="[a-z]{20}"), max_tokens=5)])
    assert events == ["forward", "masks"] * 5


def test_cheap_masks_are_filled_before_the_step_on_cpus(engine: EngineCore) -> None:
    assert engine.grammars._filler._fill_cheap_at_once


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_cheap_masks_are_filled_at_once_or_in_threads(
    device: str, engine: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a first mask is unknown, so a thread always fills it."""
    monkeypatch.setattr(engine.grammars._filler, "_fill_cheap_at_once", device == "cpu")
    in_engine: list[bool] = []
    fill = MaskFiller._fill

    def watched_fill(self: MaskFiller, state: ConstraintState, tokenizer: object) -> object:
        in_engine.append(threading.current_thread() is threading.main_thread())
        return fill(self, state, tokenizer)

    monkeypatch.setattr(MaskFiller, "_fill", watched_fill)
    monkeypatch.setattr(ConstraintState, "is_costly", False)
    generate(engine, [constrained(1, compile_grammar(regex="[a-z]{20}"), max_tokens=5)])
    assert not in_engine[0]
    assert set(in_engine[1:]) == {device == "cpu"}


def test_steps_of_other_requests_stay_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a step of the unconstrained requests runs while a constrained one waits for its id."""
    engine = make_gpu_engine(demo(), monkeypatch, **OPTIONS)
    free = constrained(1, "", max_tokens=12, stop_token_ids=())
    bound = constrained(2, compile_grammar(regex="[a-z ]{100}"), max_tokens=6)
    engine.add_requests([bound])
    while not engine.scheduler.num_running:
        engine.step()
    engine.add_requests([free])
    depths = []
    while engine.has_work:
        engine.step()
        depths.append(len(engine._in_flight))
    assert depths.count(1) >= 10, "a second step is in flight while the first one is waited for"


def test_costly_grammars_hold_up_nobody_else(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if there are more costly grammars than threads."""
    costly = [constrained(10 + number, compile_grammar(regex="[a-z]{30}")) for number in range(12)]
    cheap = [
        constrained(1, compile_grammar(regex="[0-9]{20}")),
        constrained(2, "", max_tokens=20, stop_token_ids=()),
    ]
    expected = generate(engine, [*costly, *cheap])
    may_go_on = threading.Event()
    fill = MaskFiller._fill

    def fill_slowly(self: MaskFiller, state: ConstraintState, tokenizer: object) -> object:
        if state.sampling.seed >= 10 and state.num_output:
            assert may_go_on.wait(60)
        return fill(self, state, tokenizer)

    monkeypatch.setattr(MaskFiller, "_fill", fill_slowly)
    monkeypatch.setattr(ConstraintState, "is_costly", property(lambda state: state.sampling.seed >= 10))
    engine.add_requests([*costly, *cheap])
    ids: dict[int, list[int]] = {number: [] for number in expected}
    finished: set[int] = set()
    while engine.has_work:
        for output in engine.step().outputs:
            ids[output.id] += output.token_ids
            if output.finish_reason is not None:
                finished.add(output.id)
        if finished == {1, 2} and not may_go_on.is_set():
            assert all(len(ids[request.id]) <= 1 for request in costly)
            may_go_on.set()
    assert ids == {number: result.token_ids for number, result in expected.items()}


def test_a_failing_mask_ends_its_request_alone(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance gives up on a grammar that becomes too complex."""
    fill = MaskFiller._fill

    def fail(self: MaskFiller, state: ConstraintState, tokenizer: object) -> object:
        mask = fill(self, state, tokenizer)
        if state.sampling.seed == 1 and state.num_output >= 2:
            state.error = "too complex"
            mask[:] = 0  # type: ignore[index]
        return mask

    monkeypatch.setattr(MaskFiller, "_fill", fail)
    requests = [constrained(number, compile_grammar(regex="[a-z]{30}")) for number in (1, 2)]
    engine.add_requests(requests)
    outputs = {1: [], 2: []}  # type: dict[int, list[object]]
    texts = {1: "", 2: ""}
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.id].append(output)
            texts[output.id] += text_of(output.token_ids)
    assert outputs[1][-1].finish_reason is FinishReason.ERROR  # type: ignore[attr-defined]
    assert "too complex" in outputs[1][-1].error  # type: ignore[attr-defined]
    assert outputs[2][-1].finish_reason is FinishReason.STOP and len(texts[2]) == 30  # type: ignore[attr-defined]


def test_masks_of_many_rows_are_those_of_each_alone(engine: EngineCore) -> None:
    """The results do not depend on the distribution of rows over threads."""
    requests = [
        constrained(number, compile_grammar(regex=f"[a-{chr(98 + number)}]{{6}}"), max_tokens=9) for number in range(20)
    ]
    together = generate(engine, requests)
    for request in requests[::7]:
        assert generate(engine, [request])[request.id].token_ids == together[request.id].token_ids
