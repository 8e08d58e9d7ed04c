"""Work that must not delay the end of the program."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from serve_llm.server.assemble import _in_thread


def test_results_and_errors_come_back() -> None:
    async def run() -> None:
        assert await _in_thread(lambda: threading.current_thread().daemon) is True
        with pytest.raises(ZeroDivisionError):
            await _in_thread(lambda: 1 // 0)

    asyncio.run(run())


def test_a_download_that_is_given_up_does_not_keep_the_program() -> None:
    program = (
        "import asyncio, threading\n"
        "from serve_llm.server.assemble import _in_thread\n"
        "async def main():\n"
        "    work = asyncio.ensure_future(_in_thread(threading.Event().wait))\n"
        "    await asyncio.sleep(0)\n"
        "    work.cancel()\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)
