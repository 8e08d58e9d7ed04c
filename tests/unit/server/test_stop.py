"""Stop strings: cutting and holding back do not depend on how the text is split into tokens."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from serve_llm.server.generate.stop import StopScanner

LETTERS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, stops: list[str], include: bool, armed_from: int = 0) -> tuple[str, str | None]:
    """Return the expected text and stop string, by trying every end in order."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop) and end > armed_from]
        if found:
            longest = max(found, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


def scan(pieces: list[tuple[str, bool]], stops: list[str], include: bool) -> tuple[str, str | None, list[str]]:
    scanner, given_out = StopScanner(stops, include), []
    for piece, armed in pieces:
        given_out.append(scanner.push(piece, armed))
        if scanner.matched is not None:
            return "".join(given_out), scanner.matched, given_out
    given_out.append(scanner.flush())
    return "".join(given_out), None, given_out


@given(st.lists(LETTERS, max_size=8), STOPS, st.booleans())
def test_result_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    text, matched, _ = scan([(piece, True) for piece in pieces], stops, include)
    assert (text, matched) == cut("".join(pieces), stops, include)


@given(st.lists(LETTERS, max_size=6), st.lists(LETTERS, max_size=6), STOPS)
def test_a_stop_string_must_end_in_the_armed_part(before: list[str], after: list[str], stops: list[str]) -> None:
    pieces = [(piece, False) for piece in before] + [(piece, True) for piece in after]
    text, matched, _ = scan(pieces, stops, False)
    assert (text, matched) == cut("".join(before + after), stops, False, armed_from=len("".join(before)))


def test_only_a_possible_stop_string_is_held_back() -> None:
    _, _, given_out = scan(
        [("one <", True), ("en", True), ("x", True), ("> <end", True), (">", True)], ["<end>"], False
    )
    assert given_out == ["one ", "", "<enx", "> ", ""]


def test_include_keeps_the_stop_string_and_cuts_after_it() -> None:
    assert scan([("a stop b", True)], ["stop"], True)[:2] == ("a stop", "stop")


def test_long_stop_strings_on_hostile_text() -> None:
    stops = ["a" * 1000 + str(number) for number in range(16)]
    scanner = StopScanner(stops, False)
    assert "".join(scanner.push("a" * 4, True) for _ in range(500)) == "a" * 1000  # the rest may become a stop string


def test_a_long_rejected_beginning_costs_little() -> None:
    stops = ["a" * 1020 + chr(number) + "a" for number in range(0x100, 0x100 + 128)]
    scanner = StopScanner(stops, False)
    began = time.process_time()
    for _ in range(20):
        assert scanner.push("a" * 1000, True) == ""
        assert scanner.push("z", True) == "a" * 1000 + "z"
    assert time.process_time() - began < 1.0  # comparing each stop string at each position takes 3 s
