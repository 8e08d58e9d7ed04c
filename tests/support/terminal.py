"""A program in a pseudo terminal, whose output is read until a pattern appears."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence


def heed_interrupts() -> None:
    """Restore SIGINT in a child before its program runs: a shell that started the tests in the background ignores
    it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class PseudoTerminal:
    """A context manager that ends the program."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environ,
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str, seconds: float = 60.0) -> str:
        """Return the text up to and including the first match, and discard it."""
        deadline = time.monotonic() + seconds
        while True:
            if found := re.search(pattern, self.text):
                before, self.text = self.text[: found.end()], self.text[found.end() :]
                return before
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.text!r}"
            try:
                self.text += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the program has ended
                raise AssertionError(f"ended without {pattern!r}: {self.text!r}") from None

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
