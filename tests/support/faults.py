"""The environment of a daemon whose workers fail on certain tokens; see `faulty/sitecustomize.py`."""

from __future__ import annotations

import os
from pathlib import Path

KILLER, RAISER, SLEEPER, STARVER = (
    4001,
    4002,
    4003,
    4004,
)  # tokens of the demo model that occur in none of its text prompts
_FOLDER = str(Path(__file__).with_name("faulty"))
FAULTS = {"PYTHONPATH": os.pathsep.join(filter(None, (_FOLDER, os.environ.get("PYTHONPATH"))))}
