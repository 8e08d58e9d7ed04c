"""A rank that nothing on its host watches, and the order in which a rank starts and answers steps."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from serve_llm.common.curve_zmq import Endpoint
from serve_llm.common.errors import EngineError
from serve_llm.common.types import EPLBStats
from serve_llm.engine.distributed import messages, worker_main
from serve_llm.engine.distributed.step_channels import SocketStepChannel, SocketStepReceiver
from serve_llm.engine.parallel.shm import ChannelClosed
from serve_llm.engine.scheduler.output import RunnerOutput, ScheduledTokens, SchedulerOutput
from serve_llm.engine.worker.pending_step import PendingStep

LIMIT = 60.0


def report_nothing(stats: EPLBStats) -> None:
    pytest.fail(f"no experts were placed, but reported: {stats}")


def test_it_says_that_it_lives_and_ends_with_the_engine() -> None:
    endpoint = Endpoint("127.0.0.1", "secret")
    router, url = endpoint.listen()
    program = (
        f"from serve_llm.engine.distributed.worker_main import end_with_engine; end_with_engine({url!r}, 'secret', 3)"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", program], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert router.poll(LIMIT * 1000)
            assert messages.decode_from_rank(router.recv_multipart()[1]) == messages.WorkerAlive(3)
            assert process.poll() is None
            endpoint.close()
            _, log = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
            endpoint.close()
    assert process.returncode == EngineError.exit_code and "rank 3 ends: the connection to 127.0.0.1:" in log


class Script:
    """Scripts when steps arrive and computations end. Stands in for both ends of a rank; nothing waits for them."""

    def __init__(self, coming: list[int], seconds: int) -> None:
        """coming: number of polls until the next step arrives. seconds: polls until a step has been computed."""
        self.coming, self.seconds = coming, seconds
        self.log: list[str] = []
        self.looks = self.begun = self.answered = 0
        self.done_at: list[int] = []
        self.eplb_stats: EPLBStats | None = None
        self.places_at: set[int] = set()  # steps before which experts are moved

    @property
    def ready(self) -> bool:
        self.looks += 1
        if self.begun == len(self.coming):
            return self.answered == self.begun  # then the channel is closed
        return self.looks >= self.coming[self.begun]

    def receive(self) -> bytes:
        if self.begun == len(self.coming):
            raise ChannelClosed("no more steps")
        return msgspec.msgpack.encode(SchedulerOutput([], [ScheduledTokens(0, self.begun, 1, [], True, [])]))

    def answer(self, message: bytes) -> None:
        (result,) = msgspec.msgpack.decode(message, type=list[RunnerOutput])
        assert result.token_id == self.answered, "in the order of the steps"
        self.log.append(f"answer {self.answered}")
        self.answered += 1

    def start(self, scheduler_output: SchedulerOutput, masks: object = None) -> PendingStep:
        number = scheduler_output.scheduled[0].start
        self.log.append(f"begin {number}")
        self.begun += 1
        if number in self.places_at:
            self.eplb_stats = EPLBStats(num_placements=number)
        self.done_at.append(self.looks + self.seconds)
        return PendingStep(lambda: self.looks >= self.done_at[number], lambda: [RunnerOutput(token_id=number)])


@pytest.mark.parametrize(
    ("coming", "seconds", "log"),
    [
        ([0, 0, 0], 0, "begin 0, answer 0, begin 1, answer 1, begin 2, answer 2"),  # as on a CPU
        ([0, 1, 2], 5, "begin 0, begin 1, begin 2, answer 0, answer 1, answer 2"),  # a GPU that gets steps early
        ([0, 9, 18], 3, "begin 0, answer 0, begin 1, answer 1, begin 2, answer 2"),  # a slower engine
    ],
)
def test_the_next_step_is_begun_as_soon_as_it_is_there(coming: list[int], seconds: int, log: str) -> None:
    script = Script(coming, seconds)
    with pytest.raises(ChannelClosed):
        worker_main.run_steps(script, script, answers=True, report=report_nothing)  # type: ignore[arg-type]
    assert ", ".join(script.log) == log


def test_a_rank_without_answers_waits_for_steps_alone() -> None:
    script = Script([0, 0], seconds=10**9)
    with pytest.raises(ChannelClosed):
        worker_main.run_steps(script, script, answers=False, report=report_nothing)  # type: ignore[arg-type]
    assert script.log == ["begin 0", "begin 1"]


@pytest.mark.parametrize("holds_shard", [True, False])
def test_steps_of_a_draft_model_are_for_the_stage_that_holds_it(holds_shard: bool) -> None:
    log: list[str] = []

    class Named:
        eplb_stats = None

        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, step: SchedulerOutput, masks: object) -> PendingStep:
            log.append(f"{self.name} {step.scheduled[0].start}")
            return PendingStep(lambda: True, list)

    class Source:
        ready = True

        def __init__(self) -> None:
            self.steps = [
                SchedulerOutput([], [ScheduledTokens(0, number, 1, [], True, [])], is_for_draft_model=number != 1)
                for number in range(3)
            ]

        def receive(self) -> bytes:
            if not self.steps:
                raise ChannelClosed("no more steps")
            return msgspec.msgpack.encode(self.steps.pop(0))

        def answer(self, message: bytes) -> None:
            log.append("answer")

    draft = Named("draft") if holds_shard else None
    with pytest.raises(ChannelClosed):
        worker_main.run_steps(
            Named("served"),  # type: ignore[arg-type]
            Source(),
            answers=True,
            report=report_nothing,
            draft=draft,  # type: ignore[arg-type]
        )
    both = ["draft 0", "answer", "served 1", "answer", "draft 2", "answer"]
    assert log == (both if holds_shard else ["served 1", "answer"])


def test_placements_of_experts_are_reported_once_each() -> None:
    script = Script([0] * 6, seconds=0)
    script.places_at = {1, 2, 4}
    reported: list[EPLBStats] = []
    with pytest.raises(ChannelClosed):
        worker_main.run_steps(script, script, answers=True, report=reported.append)  # type: ignore[arg-type]
    assert [stats.num_placements for stats in reported] == [1, 2, 4]


class TwoAtATime:
    """A worker whose first step ends when the second one has begun; there is no third."""

    eplb_stats = None

    def __init__(self) -> None:
        self.begun: list[int] = []

    def start(self, scheduler_output: SchedulerOutput, masks: object = None) -> PendingStep:
        number = scheduler_output.scheduled[0].start
        if number == 2:
            raise ChannelClosed("no more steps")
        self.begun.append(number)
        return PendingStep(lambda: len(self.begun) == 2, lambda: [RunnerOutput(token_id=number)])


def test_a_rank_on_another_host_begins_the_next_step_while_one_is_computed() -> None:
    endpoint = Endpoint("127.0.0.1", "secret")
    steps = SocketStepChannel(endpoint, [3])

    def compute() -> bool:
        source = SocketStepReceiver(steps.url, "secret", 3)
        assert not source.ready
        try:
            worker_main.run_steps(TwoAtATime(), source, answers=True, report=report_nothing)  # type: ignore[arg-type]
        except ChannelClosed:
            return True
        finally:
            source._socket.close()
        return False

    with ThreadPoolExecutor(1) as pool:
        computed = pool.submit(compute)
        try:
            steps.connect(LIMIT)
            for number in range(2):
                steps.send(msgspec.msgpack.encode(SchedulerOutput([], [ScheduledTokens(0, number, 1, [], True, [])])))
            answers = [msgspec.msgpack.decode(steps.receive(LIMIT), type=list[RunnerOutput]) for _ in range(2)]
            steps.send(msgspec.msgpack.encode(SchedulerOutput([], [ScheduledTokens(0, 2, 1, [], True, [])])))
            assert computed.result(LIMIT)
        finally:
            endpoint.close()
    assert [result.token_id for (result,) in answers] == [0, 1]
