"""What tests have started, for `support.observed`. A separate module, because it imports nothing from the product."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple


class BuiltEngine(NamedTuple):
    """An engine in this process."""

    config: Any  # `Config`
    tensor: int  # ranks per stage
    pipeline: int  # number of stages


ENGINES: weakref.WeakKeyDictionary[Any, BuiltEngine] = weakref.WeakKeyDictionary()
DAEMONS: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()
"""`Daemon` -> its arguments."""
