"""POST /v1/decisions, the Decisions API: typed questions about an input, answered with probabilities."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictBool, StrictStr

from serve_llm.common.options.limits import Limits
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.prompt.decisions import LABELS, Option, Question
from serve_llm.server.prompt.items import read_text_parts
from serve_llm.server.schema.common import Ignored, TranslatedBody

Json = dict[str, object]


class DecisionChoice(TranslatedBody):
    value: StrictStr | StrictBool
    description: str | None = None


class DecisionLevel(TranslatedBody):
    label: str
    description: str | None = None


class DecisionQuestion(TranslatedBody):
    type: Literal["predicate", "choice", "score"]
    instructions: str | Annotated[list[Json], Field(fail_fast=True)] = Field(
        description="The question, a text or parts of type input_text and input_json; for a predicate a statement that "
        "may be true."
    )
    name: str | None = Field(default=None, max_length=256, description="Returned with the answer.")
    choices: Annotated[list[DecisionChoice], Field(fail_fast=True)] | None = Field(
        default=None, description=f"Of a choice: 2 to {len(LABELS)} different values."
    )
    levels: Annotated[list[DecisionLevel], Field(fail_fast=True)] | None = Field(
        default=None, description=f"Of a score: 2 to {len(LABELS)} levels, the lowest first."
    )

    def to_question(self, param: str) -> Question:
        """Raises InvalidRequest, Unsupported."""
        for kind, field in (("choice", "choices"), ("score", "levels")):
            if (getattr(self, field) is None) == (self.type == kind):
                needs = "needs" if self.type == kind else "has no"
                raise InvalidRequest(f"{param}: a {self.type} {needs} {field}", f"{param}.{field}")
        options = [Option("true"), Option("false")]
        if self.choices is not None:
            options = [Option(one.value, one.description) for one in self.choices]
            if len({(type(one.value), one.value) for one in options}) < len(options):
                raise InvalidRequest(f"{param}.choices has the same value twice", f"{param}.choices")
        if self.levels is not None:
            options = [Option(one.label, one.description) for one in self.levels]
        if not 2 <= len(options) <= len(LABELS):
            field = f"{param}.{'choices' if self.type == 'choice' else 'levels'}"
            raise InvalidRequest(f"{field} must have 2 to {len(LABELS)} entries, not {len(options)}", field)
        text = read_text_parts(_write_data(self.instructions, f"{param}.instructions"), f"{param}.instructions")
        return Question(self.type, self.name, text, options)


class DecisionRequest(TranslatedBody):
    model: str | None = Field(default=None, description="A served model's name; the served model when absent.")
    input: str | Annotated[list[Json], Field(fail_fast=True)] = Field(
        description="What the questions are about: a text, or messages, calls and their outputs as in /v1/responses."
    )
    questions: Annotated[list[DecisionQuestion], Field(fail_fast=True)]
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None

    def to_questions(self, limits: Limits) -> list[Question]:
        """Raises InvalidRequest, Unsupported."""
        if not 0 < len(self.questions) <= limits.prompts:
            raise InvalidRequest(
                f"questions must have 1 to {limits.prompts} entries, not {len(self.questions)}", "questions"
            )
        if not isinstance(self.input, str) and len(self.input) > limits.messages:
            raise InvalidRequest(f"{len(self.input)} items are more than {limits.messages}", "input")
        return [question.to_question(f"questions[{index}]") for index, question in enumerate(self.questions)]

    def read_input(self) -> str | list[Json]:
        """Return the input with parts of type input_json as text. Raises InvalidRequest."""
        if isinstance(self.input, str):
            return self.input
        items = []
        for index, item in enumerate(self.input):
            content = item.get("content")
            if isinstance(content, list):
                item = {**item, "content": _write_data(content, f"input[{index}].content")}
            items.append(item)
        return items


def _write_data(content: str | list[Json], param: str) -> str | list[Json]:
    """Replace parts of type input_json by texts. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    parts = []
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "input_json":
            data = part.get("data")
            entries = data if isinstance(data, list) else [data]
            if not all(isinstance(entry, dict) for entry in entries):
                place = f"{param}[{index}].data"
                raise InvalidRequest(f"{place} must be an object or a list of objects", place)
            part = {"type": "input_text", "text": json.dumps(data, ensure_ascii=False)}
        parts.append(part)
    return parts


class DecisionReply(BaseModel):
    model: str
    answers: list[Json] = Field(description="In the order of the questions.")
    usage: Json
