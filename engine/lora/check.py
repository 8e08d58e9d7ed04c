"""Check an adapter before it is served: `python -P -m serve_llm.engine.lora.check`, started by the server.

A process of its own, because a hostile file may take any time and memory. Reads an `AdapterCheck` from its standard
input and writes an `AdapterVerdict`.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import msgspec

from serve_llm.common.errors import AdapterError
from serve_llm.common.messages import AdapterCheck, AdapterVerdict
from serve_llm.engine.lora.base_copies import check_base_copies
from serve_llm.engine.lora.files import read_adapter


def main() -> None:
    check = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=AdapterCheck)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        contents = read_adapter(Path(check.directory), check.targets, check.max_rank)
        check_base_copies(contents.copies, Path(check.model_directory))
        verdict = AdapterVerdict(contents.digest)
    except AdapterError as error:
        verdict = AdapterVerdict(error=str(error))
    except (MemoryError, RecursionError) as error:
        verdict = AdapterVerdict(error=f"{check.directory} takes too much memory: {type(error).__name__}")
    sys.stdout.buffer.write(msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    main()
