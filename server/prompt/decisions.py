"""The prompts of typed questions. The model is asked for the label of an option, which is a single token: its
probabilities at this position are the answer."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Literal

import msgspec

from serve_llm.server.http.errors import Unsupported
from serve_llm.server.prompt.chat_turn import ChatTurn, append_user_text, render_turn
from serve_llm.server.prompt.context import JobContext
from serve_llm.server.prompt.template import Message
from serve_llm.server.prompt.validate import TextRequest, check_text, check_volume, prepare
from serve_llm.server.sampling_params import SamplingParams

LABELS = string.ascii_uppercase + string.ascii_lowercase + string.digits


class Option(msgspec.Struct, frozen=True):
    value: str | bool
    description: str | None = None


class Question(msgspec.Struct, frozen=True):
    """The options of a predicate are true and false, those of a score its levels."""

    type: Literal["predicate", "choice", "score"]
    name: str | None
    instructions: str
    options: list[Option]

    def write(self) -> str:
        """Write the question as the model reads it."""
        lines = []
        for label, option in zip(LABELS, self.options, strict=False):
            value = str(option.value).lower() if isinstance(option.value, bool) else option.value
            lines.append(f"{label}) {value}" + (f": {option.description}" if option.description else ""))
        intro = "Is this statement true or false?\n" if self.type == "predicate" else ""
        return f"{intro}{self.instructions}\n\n" + "\n".join(lines) + "\n\nAnswer with the letter of one option only."


def prepare_questions(messages: Sequence[Message], questions: Sequence[Question], context: JobContext) -> TextRequest:
    """Prepare one prompt per question, requesting the log-probabilities of the labels. Raises InvalidRequest,
    Unsupported."""
    model = context.model
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    prompts = []
    for question in questions:
        turn = ChatTurn(
            messages=append_user_text(messages, question.write()), params=params, reasoning_effort="none", param="input"
        )
        text = render_turn(turn, context)
        if model.opens_reasoning(text):
            raise Unsupported("this model's answers begin with reasoning, so its first token is not an answer")
        check_text(text, model, context.model_info, truncated=False, param="input")
        prompts.append(model.tokenizer.encode(text, add_special_tokens=False))
    request = prepare(prompts, params, model, context.model_info, param="input", end_ids=model.turn_end_ids)
    most = max(len(question.options) for question in questions)
    label_ids = [_find_label_id(label, context) for label in LABELS[:most]]
    for index, question in enumerate(questions):
        ids = tuple(label_ids[: len(question.options)])
        request.samplings[index] = msgspec.structs.replace(
            request.samplings[index], logprob_token_ids=ids, allowed_token_ids=ids
        )
    check_volume(request, context.limits, "input")
    return request


def _find_label_id(label: str, context: JobContext) -> int:
    ids = context.model.tokenizer.encode(label, add_special_tokens=False)
    if len(ids) != 1:
        raise Unsupported(f"this model's tokenizer has no single token for the label {label}", "questions")
    return ids[0]
