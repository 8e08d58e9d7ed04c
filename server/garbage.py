"""Keeps Python's garbage collection from pausing the event loop, and with it every stream."""

from __future__ import annotations

import gc

MIDDLE_COLLECTIONS = 100
"""Collections of the middle generation before a full one; each comes after about 7,000 new objects. A full collection
traverses every open request, 200 ms for a queue of 2,000; requests leave no cycles, so there is little for it to
find."""


def limit_collections() -> None:
    """Call once everything that stays has been loaded."""
    gc.freeze()  # otherwise each full collection traverses all modules
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, MIDDLE_COLLECTIONS)
