"""`StructuredOutputs`: the constraint on a text, with vLLM's field names."""

from __future__ import annotations

import re

import msgspec

from serve_llm.server.http.errors import InvalidRequest

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
WHITESPACE_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "json": ((dict, bool, str), "a JSON schema as a dict, or its text; of a pydantic model, model_json_schema()"),
    "regex": ((str,), "a text"),
    "choice": ((list,), "a list of texts"),
    "grammar": ((str,), "a text"),
    "json_object": ((bool,), "True"),
    "structural_tag": ((dict, str), "a dict, or its text"),
    "whitespace_pattern": ((str,), "a text"),
}

PARAM = "structured_outputs"


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """Exactly one of json, regex, choice, grammar, json_object and structural_tag, and options for JSON.

    Raises InvalidRequest (a ValueError) that names the field.
    """

    json: dict[str, object] | bool | str | None = None  # a JSON schema, or its text
    regex: str | None = None  # matches the whole text; syntax of Rust's regex crate
    choice: list[str] | None = None
    grammar: str | None = None  # Lark with llguidance's extensions, or GBNF
    json_object: bool | None = None
    structural_tag: dict[str, object] | str | None = None  # {"format": ...} or the older form, or its JSON text
    disable_any_whitespace: bool = False  # no whitespace between the tokens of JSON
    disable_additional_properties: bool = False  # objects have only the properties that their schemas name
    whitespace_pattern: str | None = None  # a regex for the whitespace between two tokens of JSON
    param: str = PARAM  # the parameter named in errors, with the field if it is the default

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise InvalidRequest(
                f"{self.param} may have one of {', '.join(KINDS)}, not {' and '.join(given)}", self.param
            )
        if not given:
            raise InvalidRequest(f"{self.param} needs one of {', '.join(KINDS)}", self.param)
        self._check_types()
        self._check_values()
        if self.json is None and not self.json_object and self.structural_tag is None:
            for name in WHITESPACE_OPTIONS:
                if getattr(self, name):
                    raise InvalidRequest(f"{name} needs json, json_object or structural_tag", self.name_param(name))
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequest(
                "disable_any_whitespace and whitespace_pattern exclude each other",
                self.name_param("whitespace_pattern"),
            )

    def _check_types(self) -> None:
        if isinstance(self.choice, tuple):
            self.choice = list(self.choice)
        for name, (types, wanted) in _TYPES.items():
            value = getattr(self, name)
            is_wrong = value is not None and not isinstance(value, types)
            if is_wrong or (name == "choice" and not all(isinstance(text, str) for text in value or ())):
                raise InvalidRequest(f"{name} must be {wanted}, not {value!r:.100}", self.name_param(name))

    def _check_values(self) -> None:
        if self.json_object is False:
            raise InvalidRequest("json_object must be true", self.name_param("json_object"))
        for kind in ("json", "choice", "grammar", "structural_tag", "whitespace_pattern"):
            if getattr(self, kind) in ("", [], {}) and not (kind == "json" and self.json == {}):
                raise InvalidRequest(f"{kind} must not be empty", self.name_param(kind))
        if self.regex is not None and "\0" in self.regex:
            raise InvalidRequest("regex must not hold NUL", self.name_param("regex"))
        texts = [self.regex, self.grammar, self.whitespace_pattern, *(self.choice or ())]
        if isinstance(self.structural_tag, str):
            texts.append(self.structural_tag)
        for text in texts:
            if text is not None and re.search("[\ud800-\udfff]", text):
                raise InvalidRequest(f"{self.param} holds a lone surrogate, which no text can have", self.param)

    @property
    def kind(self) -> str:
        """Return which of KINDS is given."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    def name_param(self, field: str) -> str:
        """Return the parameter that an error about `field` names."""
        return f"{self.param}.{field}" if self.param == PARAM else self.param
