"""The limit on open files is raised as far as the system lets it."""

from __future__ import annotations

import resource

import pytest

from serve_llm.common.errors import CapacityError
from serve_llm.common.open_files import check_limit, raise_limit

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, (4096, 4096)),
        (1024, 1_048_576, (65536, 1_048_576)),
        (1024, UNLIMITED, (65536, UNLIMITED)),
        (100_000, 1_048_576, None),
        (UNLIMITED, UNLIMITED, None),
        (1024, 1024, None),
    ],
)
def test_raised(soft: int, hard: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: changed.append(limits))
    raise_limit()
    assert changed == ([] if expected is None else [expected])


def test_too_few_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    check_limit(768, "192 ranks")
    with pytest.raises(
        CapacityError, match=r"^193 ranks need 1028 open files in one process, but only 1024 .*ulimit -Hn"
    ):
        check_limit(772, "193 ranks")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (UNLIMITED, UNLIMITED))
    check_limit(10**9, "many ranks")
