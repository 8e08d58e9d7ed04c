"""A part of a list of stored objects."""

from __future__ import annotations

from typing import NamedTuple


class Page(NamedTuple):
    limit: int
    is_ascending: bool
    after: str | None  # the id of the object before the page
