"""Whether the linear layers of a model are batch-invariant on this processor: whether each row gets the same result in
every batch. The result, and the process that finds it. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

LIMIT_SECONDS = 300.0


class InvarianceReport(msgspec.Struct, frozen=True, kw_only=True):
    num_shapes: int = 0  # shapes of linear layers that were tried
    variant: str = ""  # variant of the compiled kernels; "torch" without them
    slow: list[str] = []  # shapes that are invariant only with a fixed number of rows, which is slower
    differing: list[str] = []  # shapes that are not invariant
    error: str = ""  # why nothing was tried


def check_invariance(directory: Path) -> InvarianceReport:
    """Try every shape of linear layer of the checkpoint in `directory`, of which only config.json is read. Takes
    seconds."""
    command = [sys.executable, "-P", "-m", "serve_llm.cli.check.invariance_worker", str(directory)]
    quiet = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=quiet, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return InvarianceReport(error=f"did not finish within {LIMIT_SECONDS:g} s")
    if run.returncode:
        lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
        return InvarianceReport(error=lines[-1])
    return msgspec.json.decode(run.stdout, type=InvarianceReport)
