"""Translate structural tags, xgrammar's description of text with constrained regions, into Lark for llguidance.

llguidance reads a text as terminals, each as long as possible and without backtracking. So what is regular becomes one
terminal together with its neighbours, and free text excludes whatever ends it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from serve_llm.server.dialects.lark import (
    Symbol,
    Symbols,
    join,
    write_free_text,
    write_literal,
    write_special_token,
)
from serve_llm.server.structured_output.checker import GrammarChecker
from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.json_schema import check_depth
from serve_llm.server.structured_output.structural_tag_fields import (
    Format,
    check_ends,
    check_flag,
    check_format,
    check_list,
    check_text,
    check_texts,
    check_triggers,
)

MAX_REPEAT = 10_000  # for the format `repeat`


class _Following(NamedTuple):
    """What follows a format: one of `texts`, else something unknown, or nothing."""

    texts: tuple[str, ...] = ()
    is_end: bool = False


_END = _Following(is_end=True)
_UNKNOWN = _Following()


def parse_structural_tag(value: object) -> Mapping[str, object]:
    """Return the object of a structural tag, which may be JSON text. Raises GrammarError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"it is malformed JSON: {error}") from None
    if not isinstance(value, dict):
        raise GrammarError("it must be a JSON object")
    check_depth(value)
    return value


def write_structural_tag(tag: Mapping[str, object], checker: GrammarChecker) -> str:
    """Write the grammar of a structural tag, {"format": ...} or the older {"structures": ..., "triggers": ...}.

    Raises GrammarError.
    """
    given = {name for name in tag if name != "type"}
    if tag.get("type", "structural_tag") != "structural_tag":
        raise GrammarError("must be structural_tag", keyword="type")
    if given == {"format"}:
        return _TagWriter(checker).write_grammar(tag["format"])
    if given != {"structures", "triggers"}:
        raise GrammarError("it needs format, or structures and triggers, and no other field")
    try:
        return _TagWriter(checker).write_grammar(_upgrade(tag))
    except GrammarError as error:
        pointer = error.pointer.replace("/format/tags", "/structures").replace("/content/json_schema", "/schema", 1)
        raise GrammarError(error.message, pointer.removeprefix("/format"), error.keyword) from None


def _upgrade(tag: Mapping[str, object]) -> Format:
    """Convert the older form to the newer one."""
    tags = []
    for index, structure in enumerate(check_list(tag["structures"], "", "structures")):
        pointer = f"/structures/{index}"
        if not isinstance(structure, dict) or set(structure) != {"begin", "schema", "end"}:
            raise GrammarError("must be an object with begin, schema and end", pointer)
        schema = structure["schema"]
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"it is malformed JSON: {error}", pointer, "schema") from None
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]})
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


class _TagWriter:
    """Writes one grammar: its rules, its terminals, and the grammars that it refers to by name."""

    def __init__(self, checker: GrammarChecker) -> None:
        self._checker = checker
        self._terminals: list[str] = []
        self._subgrammars: list[dict[str, object]] = []

    def write_grammar(self, format_: object) -> str:
        items = self._write(format_, "/format", _END)
        lines = [f"start: {self._name_terminals(items)}"]
        lines += [f"T{index}: {terminal}" for index, terminal in enumerate(self._terminals)]
        main = {"name": "structural_tag", "lark_grammar": "\n".join(lines)}
        return json.dumps({"grammars": [main, *self._subgrammars]}, ensure_ascii=False)

    def _name_terminals(self, items: Sequence[Symbol]) -> str:
        """Write the body of a rule."""
        words = []
        for item in items:
            if item.is_terminal:
                self._terminals.append(item.expression)
                words.append(f"T{len(self._terminals) - 1}")
            else:
                words.append(item.expression)
        return " ".join(words) or '""'

    def _write(self, value: object, pointer: str, following: _Following) -> Symbols:
        format_ = check_format(value, pointer)
        match format_["type"]:
            case "const_string":
                return self._write_text(check_text(format_, "value", pointer))
            case "json_schema":
                with _at(f"{pointer}/json_schema"):
                    return [self._add_subgrammar("json_schema", self._checker.write_json(format_["json_schema"]))]
            case "any_text":
                excluded = check_texts(format_["excludes"], pointer, "excludes")
                return [_write_free_text(excluded, following, pointer)]
            case "regex":
                pattern = check_text(format_, "pattern", pointer)
                with _at(pointer, "pattern"):
                    return [Symbol(self._checker.write_regex(pattern), is_terminal=True)]
            case "grammar":
                grammar = check_text(format_, "grammar", pointer)
                with _at(pointer, "grammar"):
                    return [self._add_subgrammar("lark_grammar", self._checker.build_lark(grammar))]
            case "sequence":
                return self._write_sequence(format_, pointer, following)
            case "or":
                return [self._write_alternatives(format_, pointer, following)]
            case "tag":
                return self._write_tag(format_, "", pointer, following)
            case "triggered_tags":
                return self._write_triggered_tags(format_, pointer, following)
            case kind:
                suffix = _write_quantifier(format_, pointer)
                content = self._write(format_["content"], f"{pointer}/content", _UNKNOWN)
                assert isinstance(kind, str)
                return [self._group([content], suffix)]

    def _write_text(self, text: str) -> Symbols:
        """Write items for a fixed text; special tokens in it are written as such."""
        return [
            write_special_token(piece) if isinstance(piece, int) else write_literal(piece)
            for piece in self._checker.split_special_tokens(text)
        ]

    def _add_subgrammar(self, kind: str, grammar: object) -> Symbol:
        name = f"part_{len(self._subgrammars)}"
        self._subgrammars.append({"name": name, kind: grammar})
        return Symbol(f"@{name}", is_terminal=False)

    def _write_sequence(self, format_: Format, pointer: str, following: _Following) -> Symbols:
        elements = check_list(format_["elements"], pointer, "elements")
        items: Symbols = []
        for index, element in enumerate(elements):
            place = f"{pointer}/elements/{index}"
            is_last = index == len(elements) - 1
            after = following if is_last else _find_opening(elements[index + 1])
            items = join(items, self._write(element, place, after))
        return items

    def _write_alternatives(self, format_: Format, pointer: str, following: _Following) -> Symbol:
        elements = check_list(format_["elements"], pointer, "elements")
        # A free text must be joined with what ends it, which is outside the alternatives.
        after = following if following.is_end else _UNKNOWN
        return self._group(
            [self._write(element, f"{pointer}/elements/{index}", after) for index, element in enumerate(elements)]
        )

    def _write_tag(self, format_: Format, trigger: str, pointer: str, following: _Following) -> Symbols:
        """trigger: the part of `begin` that is already written."""
        begin = check_text(format_, "begin", pointer)
        ends = check_ends(format_["end"], pointer)
        after = _Following(ends) if all(ends) else following
        items = self._write_text(begin.removeprefix(trigger))
        items = join(items, self._write(format_["content"], f"{pointer}/content", after))
        if len(ends) == 1:
            return join(items, self._write_text(ends[0]))
        return join(items, [self._group([self._write_text(text) for text in ends])])

    def _write_triggered_tags(self, format_: Format, pointer: str, following: _Following) -> Symbols:
        triggers = check_texts(format_["triggers"], pointer, "triggers")
        check_triggers(triggers, pointer)
        excluded = check_texts(format_["excludes"], pointer, "excludes")
        tags = check_list(format_["tags"], pointer, "tags")
        stops_after_first = check_flag(format_, "stop_after_first", pointer)
        at_least_one = check_flag(format_, "at_least_one", pointer)
        # What follows a tag is free text or nothing.
        after_tag = following if stops_after_first else _UNKNOWN
        by_trigger: dict[str, list[Symbols]] = {}
        for index, tag in enumerate(tags):
            place = f"{pointer}/tags/{index}"
            checked = check_format({"type": "tag", **tag} if isinstance(tag, dict) else tag, place)
            if checked["type"] != "tag":
                raise GrammarError("must be a tag", place, "type")
            begin = check_text(checked, "begin", place)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise GrammarError("does not begin with any of the triggers", place, "begin")
            by_trigger.setdefault(trigger, []).append(self._write_tag(checked, trigger, place, after_tag))
        rests = {trigger: self._group(found) for trigger, found in by_trigger.items()}
        first = self._group([join(self._write_text(trigger), [rest]) for trigger, rest in rests.items()])
        if at_least_one and stops_after_first:
            return [first]
        text = _write_free_text((*triggers, *excluded), following, pointer)
        tagged = [join(join([text], self._write_text(trigger)), [rest]) for trigger, rest in rests.items()]
        if stops_after_first:
            if not following.is_end:
                raise GrammarError("with stop_after_first and without at_least_one it must come last", pointer)
            return [self._group([*tagged, [text]])]
        more = self._group(tagged, "*")
        return [first, more, text] if at_least_one else [more, text]

    def _group(self, alternatives: Sequence[Symbols], suffix: str = "") -> Symbol:
        """Write one of several lists of items, repeated as `suffix` says."""
        if all(len(items) == 1 and items[0].is_terminal for items in alternatives):
            return Symbol(f"({' | '.join(items[0].expression for items in alternatives)}){suffix}", is_terminal=True)
        bodies = [self._name_terminals(items) for items in alternatives]
        return Symbol(f"({' | '.join(bodies)}){suffix}", is_terminal=False)


def _write_free_text(excluded: Iterable[str], following: _Following, pointer: str) -> Symbol:
    """Write a terminal for any text without the excluded texts and those that end it."""
    if not following.is_end and not following.texts:
        raise GrammarError("free text must be the last part, or a fixed text must follow that ends it", pointer)
    forbidden = dict.fromkeys((*excluded, *following.texts))
    return write_free_text([write_literal(text).expression for text in forbidden])


def _find_opening(value: object) -> _Following:
    """Return the fixed text with which a format begins."""
    if isinstance(value, dict):
        text = value.get({"const_string": "value", "tag": "begin"}.get(str(value.get("type")), ""))
        if isinstance(text, str) and text:
            return _Following((text,))
        elements = value.get("elements")
        if value.get("type") == "sequence" and isinstance(elements, list) and elements:
            return _find_opening(elements[0])
    return _UNKNOWN


@contextlib.contextmanager
def _at(pointer: str, keyword: str | None = None) -> Iterator[None]:
    """Add the place to errors of a part: `pointer` leads to it, `keyword` is its field in the structural tag."""
    try:
        yield
    except GrammarError as error:
        raise GrammarError(error.message, pointer + error.pointer, error.keyword or keyword) from None


def _write_quantifier(format_: Format, pointer: str) -> str:
    kind = format_["type"]
    if kind != "repeat":
        return {"optional": "?", "plus": "+", "star": "*"}[str(kind)]
    least = format_["min"]
    most = format_["max"]
    if type(least) is not int or not 0 <= least <= MAX_REPEAT:
        raise GrammarError(f"must be a whole number from 0 to {MAX_REPEAT}", pointer, "min")
    if type(most) is not int or not (most == -1 or max(1, least) <= most <= MAX_REPEAT):
        raise GrammarError(f"must be -1 or a whole number from min (at least 1) to {MAX_REPEAT}", pointer, "max")
    return f"{{{least},{'' if most == -1 else most}}}"
