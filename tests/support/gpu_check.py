"""Imports the modules of tests/gpu, which are only on the path of its own programs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_module(name: str) -> Any:
    """Import a module, such as "check" or "parts.idle"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests" / "gpu")
        return importlib.import_module(name)
