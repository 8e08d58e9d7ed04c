"""How a hang is told from work: by looks at the pulse of a process that does nothing, which the tests script."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence

import pytest

from serve_llm.engine.options import Options
from serve_llm.engine.pulse import Seen
from serve_llm.server import process as process_module
from serve_llm.server.process import Death, EngineProcess

LOOK_SECONDS = 0.001


@pytest.fixture(autouse=True)
def idle_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(address: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)

    monkeypatch.setattr(process_module, "launch", launch)
    monkeypatch.setattr(process_module, "LOOK_SECONDS", LOOK_SECONDS)
    monkeypatch.setattr(process_module, "STEP_SECONDS", 10 * LOOK_SECONDS)
    monkeypatch.setattr(process_module, "STEP_GRACE_SECONDS", 5 * LOOK_SECONDS)


class OverError(Exception):
    """All looks have been taken."""


class Looks:
    """Instead of the pulse: what is seen, look by look."""

    def __init__(self, seen: Sequence[Seen]) -> None:
        self._seen = list(seen)

    def read(self) -> Seen:
        if not self._seen:
            raise OverError
        return self._seen.pop(0)

    def close(self) -> None:
        pass


def watch(what: str, seen: Sequence[Seen], **options: object) -> tuple[Death | None, bool]:
    """The death that a watch returns, if it does; and whether the engine counted as one that responds at the end."""

    async def run() -> tuple[Death | None, bool]:
        engine = EngineProcess(Options.from_kwargs("demo", device="cpu", **options), "/model", 0)
        engine.client.pulse.close()
        engine.client.pulse = Looks(seen)  # type: ignore[assignment]
        try:
            death = await (engine._watch_steps() if what == "steps" else engine._watch_beats(6))
        except OverError:
            death = None
        finally:
            responds = engine.client.responds
            await engine.stop()
        return death, responds

    return asyncio.run(run())


def beats(*numbers: int) -> list[Seen]:
    return [Seen(number, 0.0, 0.0, 0) for number in numbers]


def since(*starts: float, longest: float = 0.0) -> list[Seen]:
    """Steps that began at these times; 0: none is under way."""
    return [Seen(1, start, longest, 1) for start in starts]


def test_an_engine_that_shows_no_life_hangs_after_so_many_looks_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "SILENT_LOOKS", 3)
    death, responds = watch("beats", beats(*[7] * 7))
    assert death is not None and death.reason == "hung" and "hangs: no sign of life for 0 s" in str(death.error)
    assert not responds
    assert watch("beats", beats(*[7] * 6, 8, *[8] * 5, 9)) == (None, True)
    assert watch("beats", beats(*[7] * 4)) == (None, False), "not ready before it is given up"


def test_a_step_without_result_hangs_and_many_short_ones_do_not() -> None:
    death, _ = watch("steps", since(*[5.0] * 12))
    assert death is not None and death.reason == "step_timeout" and "hangs in a step" in str(death.error)
    for well in (since(*range(1, 100)), since(*[0.0] * 99), since(*[5.0] * 9, 6.0, *[6.0] * 9, 0.0)):
        assert watch("steps", well) == (None, True)


def test_the_limit_grows_with_the_steps_that_were_seen_and_is_what_was_said_if_it_was() -> None:
    slow = since(*[5.0] * 99, longest=6 * LOOK_SECONDS)  # 20 times as much is 120 looks
    assert watch("steps", slow) == (None, True)
    assert watch("steps", [*slow, *slow])[0] is not None
    assert watch("steps", slow, step_timeout=20 * LOOK_SECONDS)[0] is not None


def test_an_engine_with_ranks_has_time_to_say_itself_who_is_silent() -> None:
    assert watch("steps", since(*[5.0] * 13), tensor_parallel_size=2) == (None, True)
    assert watch("steps", since(*[5.0] * 20), tensor_parallel_size=2)[0] is not None


def test_a_process_that_ends_while_it_starts_is_named_at_once() -> None:
    async def run() -> None:
        engine = EngineProcess(Options.from_kwargs("demo"), "/model", 0)
        assert engine._process.stdin is not None
        engine._process.stdin.close()
        with pytest.raises(process_module.EngineDead, match=r"died while starting by exit code 1; the server's log"):
            await engine.start()
        await engine.stop()

    asyncio.run(run())
