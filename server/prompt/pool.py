"""Runs `jobs`: small ones here, the others in processes that can be killed, so that no body stalls anybody's stream.

A thread would not do: it shares the interpreter's lock with the event loop, and it cannot be ended. A worker process
(`worker`) kills itself when a job takes too long; the next job gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from serve_llm.engine.options import Options
from serve_llm.engine.types import ModelFacts
from serve_llm.server import errors
from serve_llm.server.errors import DeadlineExceeded, InvalidRequest, RequestError, Unavailable
from serve_llm.server.prompt.jobs import JOBS, Context, NotHere

Result = TypeVar("Result", bound=msgspec.Struct)

SMALL_BYTES = 8192  # of a body: about a millisecond of work, for which the event loop may stand still
MAX_JOBS = 256  # at a time, most of which wait
MAX_WAIT_SECONDS = 10.0  # for a job's turn, as far as can be told
START_SECONDS = 60.0  # for a worker's imports and the tokenizer
GRACE_SECONDS = 0.5  # for a job's answer to be read after its time was over
LENGTH = struct.Struct(">I")  # before each message


class Setup(msgspec.Struct):
    """The first message to a worker."""

    directory: str
    options: Options
    facts: ModelFacts


class Job(msgspec.Struct, array_like=True):
    kind: str
    content: bytes


class Refused(msgspec.Struct, array_like=True, tag=True):
    """A RequestError, by its class."""

    kind: str
    message: str
    param: str | None


class Broken(msgspec.Struct, array_like=True, tag=True):
    """A bug of ours."""

    traceback: str


class Done(msgspec.Struct, array_like=True, tag=True):
    result: bytes  # a struct of `jobs`, encoded


class PromptPool:
    """Make it when the engine is ready; `close` it in the end."""

    def __init__(self, context: Context, options: Options) -> None:
        self._context = context
        self._setup = Setup(str(context.model.directory), options, context.facts)
        self._seconds = context.limits.prompt_seconds
        self._size = max(3, min(4, (os.cpu_count() or 1) // 2))  # of few cores too: some may be busy with bombs
        self._threads: ThreadPoolExecutor | None = None
        self._own = threading.local()  # each thread has a worker of its own
        self._workers: set[Worker] = set()
        self._num_jobs = 0
        self._job_seconds = 0.0  # that jobs take lately
        self._is_closed = False

    def warm(self) -> None:
        """Start the first worker now, so that nobody waits for it."""
        self._executor().submit(self._worker)

    async def run(self, kind: str, content: bytes, result: type[Result], deadline: float | None = None) -> Result:
        """What `JOBS[kind]` makes of a body. Raises RequestError; DeadlineExceeded where its turn comes
        after the `deadline` (in time.perf_counter()'s seconds)."""
        if len(content) <= SMALL_BYTES:
            with contextlib.suppress(NotHere):
                found = JOBS[kind](content, self._context)
                assert isinstance(found, result)
                return found
        wait = self._num_jobs / self._size * self._job_seconds
        if self._num_jobs >= MAX_JOBS or (self._num_jobs > self._size and wait > MAX_WAIT_SECONDS):
            raise Unavailable("too many large requests wait to be read", retry_after=max(1, round(wait)))
        self._num_jobs += 1
        try:
            work = functools.partial(self._run_apart, kind, content, deadline)
            reply = await asyncio.get_running_loop().run_in_executor(self._executor(), work)
        finally:
            self._num_jobs -= 1
        if isinstance(reply, Refused):
            error: RequestError = getattr(errors, reply.kind)(reply.message, reply.param)
            raise error
        if isinstance(reply, Broken):
            raise RuntimeError(reply.traceback)
        return msgspec.msgpack.decode(reply.result, type=result)

    def close(self) -> None:
        """Idempotent. Jobs under way fail."""
        self._is_closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.end()

    def _executor(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._size, "prompt")
        return self._threads

    def _worker(self) -> Worker:
        worker: Worker | None = getattr(self._own, "worker", None)
        if worker is None or not worker.is_usable:
            if worker is not None:
                worker.end()
            worker = self._own.worker = Worker()
            self._workers = {other for other in self._workers if other.is_usable} | {worker}
            if self._is_closed:  # meanwhile
                worker.end()
            worker.start(self._setup)
        return worker

    def _run_apart(self, kind: str, content: bytes, deadline: float | None) -> Done | Refused | Broken:
        worker, began = self._worker(), time.perf_counter()
        if deadline is not None and began > deadline:
            raise DeadlineExceeded("the request's time was over before it was read")
        try:
            return worker.run(Job(kind, content), self._seconds)
        except TimeoutError:
            raise InvalidRequest(f"reading, template and tokenizing took more than {self._seconds:g} s") from None
        except (OSError, EOFError, ValueError):
            raise InvalidRequest("the process that read the request ended: it takes too much memory") from None
        finally:
            self._job_seconds = 0.7 * self._job_seconds + 0.3 * (time.perf_counter() - began)


class Worker:
    """One process, used by one thread. It ends with this process: a pipe is its leash."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "serve_llm.server.prompt.worker"]
        # Not in this process' session: the terminal's Ctrl-C is not meant for it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        self._is_ended = False

    @property
    def is_usable(self) -> bool:
        return not self._is_ended and self._process.poll() is None

    def start(self, setup: Setup) -> None:
        """Raises Unavailable if it cannot."""
        try:
            self._send(msgspec.msgpack.encode(setup))
            self._receive(START_SECONDS)
        except (OSError, EOFError, ValueError) as error:
            self.end()
            raise Unavailable(f"the process that reads large requests did not start: {error}") from None

    def run(self, job: Job, seconds: float) -> Done | Refused | Broken:
        """Raises TimeoutError, EOFError or OSError when it takes too much; the process is gone then."""
        try:
            self._send(msgspec.msgpack.encode(job))
            return msgspec.msgpack.decode(self._receive(seconds + GRACE_SECONDS), type=Done | Refused | Broken)
        except EOFError:
            self.end()
            if self._process.returncode == -signal.SIGALRM:  # its own alarm clock
                raise TimeoutError from None
            raise
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kill it. Idempotent."""
        self._is_ended = True
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _send(self, message: bytes) -> None:
        assert self._process.stdin is not None
        rest = memoryview(LENGTH.pack(len(message)) + message)
        while rest:
            rest = rest[os.write(self._process.stdin.fileno(), rest) :]

    def _receive(self, seconds: float) -> bytes:
        """The next message. Raises TimeoutError, EOFError."""
        assert self._process.stdout is not None
        descriptor, received, wanted = self._process.stdout.fileno(), bytearray(), LENGTH.size
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + seconds
        while len(received) < wanted:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            data = os.read(descriptor, 2**20)
            if not data:
                self._process.wait()
                raise EOFError("it ended")
            received += data
            if wanted == LENGTH.size and len(received) >= wanted:
                wanted += LENGTH.unpack_from(received)[0]
        return bytes(received[LENGTH.size :])
