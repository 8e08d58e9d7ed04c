"""A front end process: `python -P -m serve_llm.server.front_ends --channel FD --listener FD --protocol DIGEST`, started
by the server process, never by hand. It ends when the channel to the server process closes."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import socket
import sys
from pathlib import Path

import uvloop

from serve_llm.common.logs import configure
from serve_llm.server.front_ends.front_end import FrontEnd
from serve_llm.server.front_ends.messages import compute_protocol

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
    uvloop.run(_run(channel, listener))
    return 0


async def _run(channel: socket.socket, listener: socket.socket) -> None:
    parent = os.getppid()
    front_end = FrontEnd(listener)
    await asyncio.get_running_loop().create_unix_connection(lambda: front_end.channel, sock=channel)
    await front_end.run()
    if os.getppid() != parent and front_end.server_socket is not None:  # the server was killed and could not do it
        shutil.rmtree(Path(front_end.server_socket).parent, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
