"""Run the jobs of `prompt.jobs`: small ones in this process, large or untrusted ones in worker processes, so that no
request body blocks the streams of other requests.

Threads would not work, because they share the interpreter's lock with the event loop and cannot be killed. A worker
process (`prompt.worker`) kills itself when a job takes too long, and is replaced immediately.
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
from typing import TypeVar

import msgspec

from serve_llm.common.options.schema import Options
from serve_llm.common.types import Adapter, ModelInfo
from serve_llm.server.http import errors
from serve_llm.server.http.errors import DeadlineExceeded, InvalidRequest, RequestError, Unavailable
from serve_llm.server.prompt.context import GrammarNeeded, JobContext, NeedsWorker
from serve_llm.server.prompt.jobs import JOBS
from serve_llm.server.structured_output.compiler import (
    CompilerHost,
    Grammar,
    GrammarCache,
    GrammarCompiler,
    build_death_refusal,
)
from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.turn_form import GrammarSource, compute_key, encode_source, name_param
from serve_llm.server.thread_pool import ThreadPool

Result = TypeVar("Result", bound=msgspec.Struct)

SMALL_BYTES = 8192  # bodies up to this size run in this process; they take about a millisecond
MAX_JOBS = 256  # running and waiting
MAX_WAIT_SECONDS = 10.0  # longest estimated wait for a worker
START_SECONDS = 60.0  # for a worker's imports and the tokenizer
GRAMMAR_SECONDS = 1.5  # fraction of a job's time limit that compiling a grammar may take
GRACE_SECONDS = 0.5  # added to a job's time limit, so that the worker's own alarm fires first
NO_PLACE = GrammarError("")  # the whole grammar
LENGTH = struct.Struct(">I")  # precedes each message: its length in bytes


class WorkerSetup(msgspec.Struct):
    """The first message to a worker."""

    directory: str  # the checkpoint's directory
    options: Options
    model_info: ModelInfo


class Job(msgspec.Struct, array_like=True):
    kind: str  # a key of `JOBS`
    content: bytes  # the body of the HTTP request
    adapters: dict[str, Adapter] = {}  # as `ServedModel.adapters`


class JobDone(msgspec.Struct, array_like=True, tag=True):
    result: bytes  # the struct that the job returned, in msgpack


class JobRefused(msgspec.Struct, array_like=True, tag=True):
    """The job raised a RequestError."""

    kind: str  # the name of its class
    message: str
    param: str | None

    def to_exception(self) -> RequestError:
        error: RequestError = getattr(errors, self.kind)(self.message, self.param)
        return error


class JobFailed(msgspec.Struct, array_like=True, tag=True):
    """The job raised another exception: a bug."""

    traceback: str


class GrammarLookup(msgspec.Struct, array_like=True, tag=True):
    """The job needs a grammar. The pool replies with a cached Grammar or None, in which case the worker compiles it."""

    key: bytes
    param: str  # for an error about it


class GrammarBegun(msgspec.Struct, array_like=True, tag=True):
    """The worker begins to compile the grammar of a GrammarLookup, which is named if the worker must be killed."""

    pointer: str
    keyword: str | None


class GrammarCompiled(msgspec.Struct, array_like=True, tag=True):
    """The grammar of a GrammarLookup, for other workers and the server."""

    key: bytes
    grammar: Grammar


class TokenizerLoading(msgspec.Struct, array_like=True, tag=True):
    """The worker loads the tokenizer of grammars, which does not count towards the job's time limit."""


JobReply = JobDone | JobRefused | JobFailed
WorkerMessage = JobReply | GrammarLookup | GrammarBegun | GrammarCompiled | TokenizerLoading


def build_grammar_compiler(context: JobContext, host: CompilerHost | None = None) -> GrammarCompiler:
    model = context.model
    return GrammarCompiler(
        model.tokenizer.rust.to_str,
        context.model_info.vocab_size,
        context.limits.grammar_bytes,
        host,
        model.dialect,
        model.turn_end_ids,
    )


class PromptPool:
    """Create it when the engine is ready; `close` it at the end."""

    def __init__(self, context: JobContext, options: Options) -> None:
        compiler = build_grammar_compiler(context)
        self._context = context._replace(grammars=compiler)
        self.grammars = compiler.cache  # what workers compiled
        self._setup = WorkerSetup(str(context.model.directory), options, context.model_info)
        self._seconds = context.limits.prompt_seconds
        # At least 3 even on few cores, because hostile requests may keep some busy.
        self._size = max(3, min(4, (os.cpu_count() or 1) // 2))
        self._threads: ThreadPool | None = None
        self._local = threading.local()  # each thread has its own worker
        self._workers: set[PromptWorker] = set()
        self._num_jobs = 0
        self._job_seconds = 0.0  # moving average of the time that a job takes
        self._is_closed = False

    def start_first_worker(self) -> None:
        """Start one worker in the background, so that it is ready for the first large request or grammar."""
        with contextlib.suppress(Unavailable):  # no thread; the first request tries again
            self._executor().submit(self._warm_worker)

    def _warm_worker(self) -> None:
        worker = self._get_worker()
        worker.run(Job("warm", b""), self._seconds, self.grammars)

    async def run(self, kind: str, content: bytes, result: type[Result], deadline: float | None = None) -> Result:
        """Return the result of `JOBS[kind]` for a request body.

        deadline: latest start of the job in a worker, in time.perf_counter() seconds. Raises RequestError:
        DeadlineExceeded past the deadline, Unavailable when too many jobs wait."""
        if len(content) <= SMALL_BYTES:
            with contextlib.suppress(NeedsWorker):
                try:
                    return self._run_here(kind, content, result)
                except GrammarNeeded as needed:
                    await self._compile(needed.source, deadline)
                return self._run_here(kind, content, result)
        return msgspec.msgpack.decode(
            await self._send_to_worker(Job(kind, content, self._context.model.adapters), deadline), type=result
        )

    def _run_here(self, kind: str, content: bytes, result: type[Result]) -> Result:
        """Raises NeedsWorker, RequestError."""
        done = JOBS[kind](content, self._context)
        assert isinstance(done, result)
        return done

    async def _compile(self, source: GrammarSource, deadline: float | None) -> None:
        """Compile a grammar in a worker, and cache the grammar or its error."""
        content = encode_source(source)
        key = compute_key(source)
        try:
            found = msgspec.msgpack.decode(await self._send_to_worker(Job("grammar", content), deadline), type=Grammar)
        except InvalidRequest as error:  # the worker was killed
            if error.param is None:
                refusal = build_death_refusal(name_param(source), NO_PLACE, error.message)
            else:  # it was compiling, perhaps a part with its own parameter
                refusal = Grammar(error=error.message, param=error.param)
            found = self.grammars.get(key) or refusal
        self.grammars.put(key, found)

    async def _send_to_worker(self, job: Job, deadline: float | None) -> bytes:
        """The encoded result. Raises RequestError."""
        wait = self._num_jobs / self._size * self._job_seconds
        if self._num_jobs >= MAX_JOBS or (self._num_jobs > self._size and wait > MAX_WAIT_SECONDS):
            raise Unavailable("too many large requests are waiting to be parsed", retry_after=max(1, round(wait)))
        self._num_jobs += 1
        try:
            work = functools.partial(self._run_in_worker, job, deadline)
            reply = await asyncio.get_running_loop().run_in_executor(self._executor(), work)
        finally:
            self._num_jobs -= 1
        if isinstance(reply, JobRefused):
            raise reply.to_exception()
        if isinstance(reply, JobFailed):
            raise RuntimeError(reply.traceback)
        return reply.result

    def close(self) -> None:
        """Kill all workers; running jobs fail. Idempotent."""
        self._is_closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.kill()

    def _executor(self) -> ThreadPool:
        if self._threads is None:
            self._threads = ThreadPool(self._size, "prompt")
        return self._threads

    def _get_worker(self) -> PromptWorker:
        """Return this thread's worker, starting one if necessary. Raises Unavailable."""
        worker: PromptWorker | None = getattr(self._local, "worker", None)
        if worker is None or not worker.is_usable:
            try:
                worker = self._launch_worker()
            except OSError as error:  # no further process or file is allowed
                message = f"the process that parses large requests cannot be launched: {error.strerror}"
                raise Unavailable(message) from None
        worker.wait_until_ready()
        return worker

    def _launch_worker(self) -> PromptWorker:
        """Start a worker for this thread without waiting until it is ready."""
        worker: PromptWorker | None = getattr(self._local, "worker", None)
        if worker is not None:
            worker.kill()
        worker = PromptWorker(self._setup)
        self._local.worker = worker
        self._workers = {other for other in self._workers if other.is_usable} | {worker}
        if self._is_closed:  # while the process was started
            worker.kill()
        return worker

    def _run_in_worker(self, job: Job, deadline: float | None) -> JobReply:
        """Runs in a thread of the pool."""
        worker = self._get_worker()
        began = time.perf_counter()
        if deadline is not None and began > deadline:
            raise DeadlineExceeded("the deadline passed before the request was parsed")
        try:
            return worker.run(job, self._seconds, self.grammars)
        except TimeoutError:
            message = f"parsing, rendering and tokenizing took more than {self._seconds:g} s"
            grammar_seconds = min(self._seconds, GRAMMAR_SECONDS)
            raise self._explain_death(worker, message, f"compiling it took more than {grammar_seconds:g} s") from None
        except (OSError, EOFError, ValueError):
            message = "the process that parsed the request died: it needs too much memory"
            raise self._explain_death(worker, message, "compiling it needs too much memory") from None
        finally:
            self._job_seconds = 0.7 * self._job_seconds + 0.3 * (time.perf_counter() - began)

    def _explain_death(self, worker: PromptWorker, message: str, grammar_reason: str) -> InvalidRequest:
        """Build the error of a job whose worker was killed. A grammar that was being compiled is not tried again."""
        lookup = worker.compiling
        error = InvalidRequest(message)
        if lookup is not None:
            refusal = build_death_refusal(lookup.param, worker.largest, grammar_reason)
            self.grammars.put(lookup.key, refusal)
            error = InvalidRequest(refusal.error, refusal.param)
        if not self._is_closed:
            with contextlib.suppress(OSError):  # the next job tries again
                self._launch_worker()  # start it now, so that it is ready for the next job
        return error


class PromptWorker:
    """The parent's side of one worker process, used by one thread. The process ends when its stdin closes, so it never
    outlives this process."""

    def __init__(self, setup: WorkerSetup) -> None:
        command = [sys.executable, "-P", "-m", "serve_llm.server.prompt.worker"]
        # In a new session, which the terminal's Ctrl-C does not reach.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        self._is_killed = False
        self._received = bytearray()  # not used yet
        self.compiling: GrammarLookup | None = None  # the grammar that is being compiled
        self.largest = NO_PLACE  # names the largest part of that grammar
        self._is_ready = False
        with contextlib.suppress(OSError):  # it has ended, which `wait_until_ready` reports
            self._send(msgspec.msgpack.encode(setup))

    @property
    def is_usable(self) -> bool:
        return not self._is_killed and self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Raises Unavailable if the process fails to start."""
        if self._is_ready:
            return
        try:
            self._receive(START_SECONDS)
        except (OSError, EOFError, ValueError) as error:
            self.kill()
            raise Unavailable(f"the process that parses large requests did not start: {error}") from None
        self._is_ready = True

    def run(self, job: Job, seconds: float, grammars: GrammarCache) -> JobReply:
        """Run a job. Raises TimeoutError when it takes longer, EOFError or OSError when the process dies.

        After an exception the process is gone, and `compiling` holds the grammar that it was compiling.
        """
        self.compiling = None
        deadline = time.monotonic() + seconds + GRACE_SECONDS
        try:
            self._send(msgspec.msgpack.encode(job))
            while True:
                received = self._receive(max(0.0, deadline - time.monotonic()))
                message: WorkerMessage = msgspec.msgpack.decode(received, type=WorkerMessage)
                if isinstance(message, GrammarLookup):
                    found = grammars.get(message.key)
                    self.compiling = message if found is None else None
                    self.largest = NO_PLACE
                    self._send(msgspec.msgpack.encode(found))
                elif isinstance(message, GrammarBegun):
                    self.largest = GrammarError("", message.pointer, message.keyword)
                elif isinstance(message, GrammarCompiled):
                    grammars.put(message.key, message.grammar)
                    self.compiling = None
                elif isinstance(message, TokenizerLoading):
                    deadline += START_SECONDS
                else:
                    return message
        except EOFError:
            self.kill()
            if self._process.returncode == -signal.SIGALRM:  # its own alarm
                raise TimeoutError from None
            raise
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Idempotent."""
        self._is_killed = True
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _send(self, message: bytes) -> None:
        assert self._process.stdin is not None
        descriptor = self._process.stdin.fileno()
        unsent = memoryview(LENGTH.pack(len(message)) + message)
        while unsent:
            unsent = unsent[os.write(descriptor, unsent) :]

    def _receive(self, seconds: float) -> bytes:
        """The next message. Raises TimeoutError, EOFError."""
        deadline = time.monotonic() + seconds
        self._receive_bytes(LENGTH.size, deadline)
        size = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        self._receive_bytes(size, deadline)
        message = bytes(self._received[LENGTH.size : size])
        del self._received[:size]
        return message

    def _receive_bytes(self, number: int, deadline: float) -> None:
        """Wait until `number` bytes have been received."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while len(self._received) < number:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            data = os.read(descriptor, 2**20)
            if not data:
                self._process.wait()
                raise EOFError("it ended")
            self._received += data
