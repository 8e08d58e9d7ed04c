"""A process that runs `jobs` for `pool`: `python -P -m serve_llm.server.prompt.worker`, never by hand.

It trusts nothing that it is given: an alarm clock ends it when a job takes too long, and its memory is limited. Its
standard input is its leash: it ends when that closes.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import BinaryIO

import msgspec

from serve_llm.engine.limits import Limits
from serve_llm.server.errors import InvalidRequest, RequestError
from serve_llm.server.prompt.jobs import JOBS, Context
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pool import LENGTH, Broken, Done, Job, Refused, Setup

MEMORY_BYTES = 2**30  # that jobs may take besides what the process has at its start


def main() -> None:
    receive, answer = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed must not come between the messages
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it is doing
    setup = msgspec.msgpack.decode(_read(receive), type=Setup)
    limits = Limits.read(setup.options.limit)
    model = ServedModel.load(Path(setup.directory), setup.options)
    trusts = setup.options.trust_request_chat_template
    context = Context(model, setup.facts, limits, trusts_templates=trusts, is_apart=True)
    _limit_memory()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries print when memory runs out is no news for the log
    _write(answer, b"")
    while message := _read(receive):
        job = msgspec.msgpack.decode(message, type=Job)
        signal.setitimer(signal.ITIMER_REAL, limits.prompt_seconds)
        reply = _run(job, context)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answer, msgspec.msgpack.encode(reply))


def _run(job: Job, context: Context) -> Done | Refused | Broken:
    try:
        return Done(msgspec.msgpack.encode(JOBS[job.kind](job.content, context)))
    except RequestError as error:
        return Refused(type(error).__name__, error.message, error.param)
    except (MemoryError, RecursionError) as error:
        return Refused(InvalidRequest.__name__, f"the request takes too much to read: {type(error).__name__}", None)
    except Exception:
        return Broken(traceback.format_exc())


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(stream: BinaryIO) -> bytes:
    """The next message; empty at the end."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def _write(stream: BinaryIO, message: bytes) -> None:
    stream.write(LENGTH.pack(len(message)) + message)
    stream.flush()


if __name__ == "__main__":
    main()
