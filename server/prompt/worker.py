"""The worker process of `prompt.pool`: `python -P -m serve_llm.server.prompt.worker`, started by the pool only.

It protects itself against hostile requests: an alarm ends the process if a job takes too long, and its memory is
limited. It also ends when its standard input closes, that is, when the server ends.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from serve_llm.server.http.errors import InvalidRequest, RequestError
from serve_llm.server.prompt.context import JobContext
from serve_llm.server.prompt.jobs import JOBS
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pool import (
    GRAMMAR_SECONDS,
    LENGTH,
    GrammarBegun,
    GrammarCompiled,
    GrammarLookup,
    Job,
    JobDone,
    JobFailed,
    JobRefused,
    JobReply,
    TokenizerLoading,
    WorkerSetup,
    build_grammar_compiler,
)
from serve_llm.server.structured_output.compiler import Grammar

# In addition to the address space of the process after its start.
MEMORY_BYTES = 2**30  # for jobs
TOKENIZER_BYTES = 2**28  # for the tokenizer of grammars

MIN_SECONDS = 0.001  # the shortest alarm: 0 switches it off


class _Parent:
    """The server's grammar cache, as seen by this process's grammar compiler."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies
        self._deadline = 0.0  # the job's, in time.monotonic() seconds

    def find(self, key: bytes, param: str) -> Grammar | None:
        _write(self._replies, msgspec.msgpack.encode(GrammarLookup(key, param)))
        found: Grammar | None = msgspec.msgpack.decode(_read(self._requests), type=Grammar | None)
        if found is None:
            seconds, _ = signal.getitimer(signal.ITIMER_REAL)
            self._deadline = time.monotonic() + seconds
            signal.setitimer(signal.ITIMER_REAL, min(seconds, GRAMMAR_SECONDS))
        return found

    def begin(self, pointer: str, keyword: str | None) -> None:
        _write(self._replies, msgspec.msgpack.encode(GrammarBegun(pointer, keyword)))

    def keep(self, key: bytes, grammar: Grammar) -> None:
        _write(self._replies, msgspec.msgpack.encode(GrammarCompiled(key, grammar)))
        signal.setitimer(signal.ITIMER_REAL, max(MIN_SECONDS, self._deadline - time.monotonic()))

    @contextlib.contextmanager
    def allow_loading(self) -> Iterator[None]:
        """Stop the alarm and tell the parent, which has its own alarm."""
        _write(self._replies, msgspec.msgpack.encode(TokenizerLoading()))
        seconds, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        yield
        signal.setitimer(signal.ITIMER_REAL, max(MIN_SECONDS, seconds))


def main() -> None:
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it is doing
    setup = msgspec.msgpack.decode(_read(requests), type=WorkerSetup)
    options = setup.options
    limits = options.limits
    context = JobContext(
        ServedModel.load(Path(setup.directory), options),
        setup.model_info,
        limits,
        trusts_templates=options.trust_request_chat_template,
        ignores_unknown_fields=options.unknown_fields == "ignore",
        is_worker=True,
    )
    context = context._replace(grammars=build_grammar_compiler(context, _Parent(requests, replies)))
    _limit_memory()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # keep output of libraries on MemoryError out of the server's log
    _write(replies, b"")  # ready
    while message := _read(requests):
        job = msgspec.msgpack.decode(message, type=Job)
        context.model.adapters.clear()
        context.model.adapters.update(job.adapters)
        signal.setitimer(signal.ITIMER_REAL, limits.prompt_seconds)
        reply = _run(job, context)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, msgspec.msgpack.encode(reply))


def _run(job: Job, context: JobContext) -> JobReply:
    try:
        return JobDone(msgspec.msgpack.encode(JOBS[job.kind](job.content, context)))
    except RequestError as error:
        return JobRefused(type(error).__name__, error.message, error.param)
    except (MemoryError, RecursionError) as error:
        message = f"the request takes too much memory to parse: {type(error).__name__}"
        return JobRefused(InvalidRequest.__name__, message, None)
    except Exception:
        return JobFailed(traceback.format_exc())


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES + TOKENIZER_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(stream: BinaryIO) -> bytes:
    """The next message; empty at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return b""
    return stream.read(LENGTH.unpack(head)[0])


def _write(stream: BinaryIO, message: bytes) -> None:
    stream.write(LENGTH.pack(len(message)) + message)
    stream.flush()


if __name__ == "__main__":
    main()
