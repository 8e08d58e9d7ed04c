"""A front end process: `python -P -m serve_llm.server.front_ends --channel FD --listener FD --protocol DIGEST`, started
by the server process, never by hand. It ends when the channel to the server process closes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
from pathlib import Path

from serve_llm.common.logs import configure
from serve_llm.server.front_ends.front_end import FrontEnd
from serve_llm.server.front_ends.messages import compute_protocol
from serve_llm.server.thread_pool import run_main

logger = logging.getLogger("serve_llm.server.front_ends.__main__")  # also when run by -m


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--protocol", required=True)
    given = parser.parse_args()
    if given.protocol != compute_protocol():
        configure("info")
        logger.error("This version cannot work with the server that is running: restart the whole server")
        return 1
    channel = socket.socket(fileno=given.channel)
    channel.setblocking(False)
    listener = socket.socket(fileno=given.listener)
    run_main(_run(channel, listener))
    return 0


async def _run(channel: socket.socket, listener: socket.socket) -> None:
    parent = os.getppid()
    front_end = FrontEnd(listener)
    await asyncio.get_running_loop().create_unix_connection(lambda: front_end.channel, sock=channel)
    is_cut_off = await front_end.run()
    if is_cut_off and front_end.server_socket is not None and await _has_other_parent(parent):
        path = Path(front_end.server_socket)  # the server was killed and could not remove it
        with contextlib.suppress(OSError):  # another front end may have done it
            path.unlink(missing_ok=True)
            path.parent.rmdir()


async def _has_other_parent(parent: int) -> bool:
    """Whether this process has lost its parent. When a process is killed, its channels close a moment earlier."""
    for _ in range(10):
        if os.getppid() != parent:
            return True
        await asyncio.sleep(0.05)
    return False


if __name__ == "__main__":
    sys.exit(main())
