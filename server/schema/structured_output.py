"""The fields that constrain a text: `response_format` (OpenAI's) and `structured_outputs` (vLLM's)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.structured_output.params import PARAM, StructuredOutputs


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(description="Has no effect.")
    description: str | None = Field(default=None, description="Has no effect.")
    json_schema: dict[str, object] | bool = Field(alias="schema")
    strict: bool | None = Field(default=None, description="Has no effect: a schema is always enforced.")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: str = Field(description="text, json_object, json_schema or structural_tag.")
    json_schema: JsonSchemaFormat | None = Field(default=None, description="With type json_schema.")
    json_object_schema: dict[str, object] | bool | None = Field(
        default=None, alias="schema", description="With type json_object or json_schema: llama.cpp's form."
    )
    format: dict[str, object] | None = Field(default=None, description="With type structural_tag.")
    structures: list[object] | None = Field(default=None, description="With type structural_tag, before `format`.")
    triggers: list[object] | None = Field(default=None, description="With `structures`.")

    def to_params(self) -> StructuredOutputs | None:
        """Return None for plain text. Raises InvalidRequest, Unsupported."""
        fields = _FIELDS_OF_TYPES.get(self.type)
        if fields is None:
            raise Unsupported(
                f"response_format.type must be one of {', '.join(_FIELDS_OF_TYPES)}, not {self.type!r}",
                "response_format.type",
            )
        given = {name: value for name, field in _TYPE_FIELDS.items() if (value := getattr(self, field)) is not None}
        for name in given:
            if name not in fields:
                raise InvalidRequest(
                    f"response_format.{name} is not a field of type {self.type}", f"response_format.{name}"
                )
        if self.json_object_schema is not None:
            if self.json_schema is not None:
                raise InvalidRequest(
                    "response_format.schema and response_format.json_schema exclude each other",
                    "response_format.schema",
                )
            if self.type == "json_object" and self.json_object_schema in ({}, True):  # any object, but no other value
                return StructuredOutputs(json_object=True, param="response_format.schema")
            return StructuredOutputs(json=self.json_object_schema, param="response_format.schema")
        if self.type == "json_schema":
            if self.json_schema is None:
                raise InvalidRequest(
                    "response_format.json_schema is required with type json_schema", "response_format.json_schema"
                )
            return StructuredOutputs(json=self.json_schema.json_schema, param="response_format.json_schema.schema")
        if self.type == "json_object":
            return StructuredOutputs(json_object=True, param="response_format.type")
        if self.type == "structural_tag":
            return StructuredOutputs(structural_tag={"type": self.type, **given}, param="response_format")
        return None


_TYPE_FIELDS = {
    "json_schema": "json_schema",
    "schema": "json_object_schema",
    "format": "format",
    "structures": "structures",
    "triggers": "triggers",
}
_FIELDS_OF_TYPES: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema"),
    "structural_tag": ("format", "structures", "triggers"),
}


def _refuse_many(value: object) -> object:
    """Refuse too many entries early: pydantic spends microseconds on every wrong one."""
    if isinstance(value, dict) and len(value) > 64:
        raise ValueError("more than 64 entries")
    return value


class StructuredOutputsFields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    json_schema: dict[str, object] | bool | str | None = Field(
        default=None, alias="json", description="A JSON schema, or its text."
    )
    regex: str | None = Field(default=None, description="Of the whole text.")
    choice: Annotated[list[str], Field(fail_fast=True)] | None = Field(default=None, description="One of these texts.")
    grammar: str | None = Field(default=None, description="Lark with a rule `start`, or GBNF.")
    json_object: bool | None = Field(default=None, description="Any JSON object.")
    structural_tag: dict[str, object] | str | None = Field(
        default=None, description="A structural tag of xgrammar, or its JSON text."
    )
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = Field(default=None, description="A regex, for whitespace between JSON's tokens.")
    _param: str = PrivateAttr(default=PARAM)

    @classmethod
    def from_other_name(cls, param: str, kind: str, value: object, whitespace: str | None) -> StructuredOutputsFields:
        """Build them from a field of another server. param: its name, for errors. kind: the field here."""
        fields = cls(**{kind: value}, whitespace_pattern=whitespace)  # type: ignore[arg-type]
        fields._param = param
        return fields

    @property
    def param(self) -> str:
        """The field of the request that holds the constraint."""
        return self._param

    def to_params(self) -> StructuredOutputs:
        """Raises InvalidRequest, Unsupported."""
        return StructuredOutputs(
            json=self.json_schema,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            json_object=self.json_object,
            structural_tag=self.structural_tag,
            disable_any_whitespace=bool(self.disable_any_whitespace),
            disable_additional_properties=bool(self.disable_additional_properties),
            whitespace_pattern=self.whitespace_pattern,
            param=self._param,
        )


StructuredOutputsField = Annotated[StructuredOutputsFields | None, BeforeValidator(_refuse_many)]
