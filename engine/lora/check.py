"""Check an adapter before it is served: `python -P -m serve_llm.engine.lora.check`, started by the server.

Runs as a separate process, because a hostile file may take unlimited time and memory. Reads an `AdapterCheck` from
standard input and writes an `AdapterVerdict`.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from serve_llm.common.errors import AdapterError
from serve_llm.common.messages import AdapterCheck, AdapterVerdict
from serve_llm.engine.lora.base_copies import check_base_copies
from serve_llm.engine.lora.files import read_adapter

# Limit on the processor time for an adapter's regular expressions. Each rank matches them whenever it loads the
# adapter.
PATTERN_SECONDS = 1.0


def main() -> None:
    check = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=AdapterCheck)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        contents = read_adapter(Path(check.directory), check.targets, check.max_rank, _limit_patterns)
        check_base_copies(contents.copies, Path(check.model_directory))
        verdict = AdapterVerdict(contents.digest)
    except AdapterError as error:
        verdict = AdapterVerdict(error=str(error))
    except (MemoryError, RecursionError) as error:
        verdict = AdapterVerdict(error=f"{check.directory} takes too much memory: {type(error).__name__}")
    sys.stdout.buffer.write(msgspec.msgpack.encode(verdict))


@contextlib.contextmanager
def _limit_patterns() -> Iterator[None]:
    """Raise AdapterError in the block when its time is over, even in the middle of a match."""

    def refuse(*_: object) -> None:
        raise AdapterError(f"rank_pattern and alpha_pattern take more than {PATTERN_SECONDS:g} s to match")

    signal.signal(signal.SIGVTALRM, refuse)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATTERN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


if __name__ == "__main__":
    main()
