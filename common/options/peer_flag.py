"""Building blocks for the tables of other engines' options."""

from __future__ import annotations

from typing import NamedTuple


class PeerFlag(NamedTuple):
    """An option of another engine, under all its names."""

    names: tuple[str, ...]  # names of a refused option may be patterns, such as --yarn-*
    answer: str  # one line: its counterpart here
    ours: str = ""  # our equivalent, such as "--no-prefix-caching"; MODEL is the positional argument
    takes_value: bool = False  # accepted with a value, which is passed on
    neutral: tuple[str, ...] = ()  # accepted with these lower-case values, which describe what always happens here
    is_always: bool = False  # accepted without a value, because the requested behaviour is always on here
    may_be_off: bool = False  # in Python and YAML, false is accepted as well
    is_ignored: bool = False  # accepted with any value, since it concerns a part that does not exist here
    at_most: int | None = None  # accepted with numbers up to this one, which restrict nothing that is served here

    @property
    def is_accepted(self) -> bool:
        return bool(self.ours) or self.is_always or self.is_ignored

    @property
    def is_refused(self) -> bool:
        """Whether the option is an error with any value that asks for something."""
        return not (self.is_accepted or self.depends_on_value)

    @property
    def has_value(self) -> bool:
        return self.takes_value or bool(self.neutral) or self.at_most is not None

    @property
    def depends_on_value(self) -> bool:
        """Whether the option is accepted only with a value for which `allows` is true."""
        return bool(self.neutral) or self.at_most is not None

    def allows(self, value: object) -> bool:
        text = str(value).lower()
        if self.at_most is not None:
            return text.isdecimal() and int(text) <= self.at_most
        return text in self.neutral


def same(names: str, ours: str, note: str = "") -> PeerFlag:
    """Another name for an option that takes a value. note: a difference that a user should know."""
    answer = f"here it is {ours}" + (f"; {note}" if note else "")
    return PeerFlag(tuple(names.split()), answer, ours, takes_value=True)


def switch(names: str, ours: str) -> PeerFlag:
    """A flag without a value that means one of our options, written with its value if it has one."""
    return PeerFlag(tuple(names.split()), f"here it is {ours}", ours)


def always(names: str, answer: str, may_be_off: bool = False) -> PeerFlag:
    """Return a flag without a value whose behaviour is always on here."""
    return PeerFlag(tuple(names.split()), answer, is_always=True, may_be_off=may_be_off)


def neutral(names: str, values: str, answer: str) -> PeerFlag:
    """An option that is accepted with `values`, separated by `|`, and refused with others."""
    return PeerFlag(tuple(names.split()), answer, neutral=tuple(values.split("|")))


def ignored(names: str, answer: str, takes_value: bool = False) -> PeerFlag:
    """An option that is accepted with any value and has no effect. answer: why, for the notice."""
    return PeerFlag(tuple(names.split()), answer, takes_value=takes_value, is_ignored=True)


def up_to(names: str, number: int, answer: str) -> PeerFlag:
    """A limit that is accepted up to ours, since ours is then the looser one."""
    return PeerFlag(tuple(names.split()), answer, at_most=number)


def refused(names: str, answer: str) -> PeerFlag:
    """An option without an equivalent."""
    return PeerFlag(tuple(names.split()), answer)
