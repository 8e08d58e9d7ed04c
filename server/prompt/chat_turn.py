"""`ChatTurn`: a conversation to answer, in the common form of all chat routes and `LLM.chat`.

Independent of the shape of request bodies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from serve_llm.common.options.parsers import RESERVED_VARIABLES
from serve_llm.common.types import ThinkingBudget
from serve_llm.server.dialects.dialect import Delimiter, get_forms
from serve_llm.server.dialects.tool import Tool, ToolChoice
from serve_llm.server.http.errors import ContextTooLong, InvalidRequest, Unsupported
from serve_llm.server.prompt.context import JobContext, NeedsWorker
from serve_llm.server.prompt.messages import count_calls
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.template import CONTENT_FORMATS, ChatTemplate, ContentFormat, Message
from serve_llm.server.prompt.validate import ReplyFormat, TextRequest, check_text, check_volume, prepare
from serve_llm.server.sampling_params import SamplingParams
from serve_llm.server.structured_output.turn_form import TurnForm

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names that templates use for the reasoning of earlier turns."""


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """messages: from `prompt.messages.plain_messages`. param, max_tokens_param: how errors name the messages and
    `params.max_tokens`."""

    messages: Sequence[Message]
    skipped: Sequence[str] = ()  # places of what `messages` leaves out
    params: SamplingParams
    tools: Sequence[Tool] = ()
    documents: Sequence[Mapping[str, object]] = ()  # for templates that show them
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # in addition to those that the template writes
    chat_template: str | None = None  # instead of the model's own
    content_format: ContentFormat = "auto"
    chat_template_kwargs: Mapping[str, object] | None = None
    priority: int = 0
    cache_salt: str = ""
    param: str = "messages"
    max_tokens_param: str = "max_tokens"
    default_max_tokens: int | None = None  # upper bound if `params.max_tokens` is None

    @property
    def offers_calls(self) -> bool:
        """Whether the model may call tools."""
        return bool(self.tools) and self.tool_choice.mode != "none"


def append_user_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Append a text of the user to the last message, if that is the user's: templates may require roles to
    alternate."""
    if messages and messages[-1]["role"] == "user":
        *before, last = messages
        return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]


def prepare_turn(turn: ChatTurn, context: JobContext) -> tuple[str, TextRequest]:
    """Render the prompt and build the request for the engine. Raises InvalidRequest, NeedsWorker."""
    params = turn.params
    text = render_turn(turn, context)
    reply = _build_reply_format(turn, text, context)
    grammar = _find_grammar(turn, reply, context)
    check_text(text, context.model, context.model_info, params.truncate_prompt_tokens is not None, turn.param)
    ids = context.model.tokenizer.encode(text, add_special_tokens=turn.add_special_tokens)
    default_max_tokens = turn.default_max_tokens
    if default_max_tokens is None and params.logprobs is not None:
        default_max_tokens = _count_tokens_with_logprobs(params, context.limits.logprobs)
    try:
        request = prepare(
            [ids],
            params,
            context.model,
            context.model_info,
            param=turn.param,
            default_max_tokens=default_max_tokens,
            end_ids=context.model.turn_end_ids,
            grammar=grammar,
            reply=reply,
            thinking=None if reply is None else _build_thinking_budget(turn, reply, context.model),
            priority=turn.priority,
            cache_salt=turn.cache_salt,
        )
    except ContextTooLong as error:
        if error.param != "max_tokens":
            raise
        message = error.message.replace("max_tokens", turn.max_tokens_param)
        raise ContextTooLong(message, turn.max_tokens_param) from None
    check_volume(request, context.limits, turn.param)
    return text, request


def count_prompt_tokens(turn: ChatTurn, context: JobContext) -> int:
    """Raises InvalidRequest, NeedsWorker."""
    return len(context.model.tokenizer.encode(render_turn(turn, context), add_special_tokens=False))


def render_turn(turn: ChatTurn, context: JobContext) -> str:
    """Render the prompt. Raises InvalidRequest, NeedsWorker."""
    if not turn.messages:
        raise InvalidRequest(f"{turn.param} must not be empty", turn.param)
    if turn.content_format not in CONTENT_FORMATS:
        allowed = ", ".join(CONTENT_FORMATS)
        raise InvalidRequest(
            f"chat_template_content_format must be one of {allowed}, not {turn.content_format!r}",
            "chat_template_content_format",
        )
    _check_template_kwargs(turn)
    template = _choose_template(turn, context)
    kwargs: dict[str, object] = dict(context.model.template_variables)
    if turn.reasoning_effort is not None:
        # A template reads at most one of these switches.
        thinks = turn.reasoning_effort != "none"
        kwargs |= {"reasoning_effort": turn.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
    if turn.documents:
        if "documents" not in template.variables:
            raise Unsupported("this model's chat template shows no documents", "documents")
        kwargs["documents"] = turn.documents
    return template.render(
        [_name_reasoning(message, template) for message in turn.messages],
        max_characters=context.limits.template_characters,
        add_generation_prompt=turn.add_generation_prompt,
        continue_final_message=turn.continue_final_message,
        tools=[_describe_tool(tool) for tool in turn.tools],
        kwargs={**kwargs, **(turn.chat_template_kwargs or {})},
        content_format=turn.content_format,
    )


def _check_template_kwargs(turn: ChatTurn) -> None:
    """Refuse variables that other fields of the request set. Raises InvalidRequest."""
    for name, value in (turn.chat_template_kwargs or {}).items():
        if name in RESERVED_VARIABLES and value is not getattr(turn, name):
            raise InvalidRequest(
                f"chat_template_kwargs may not set {name}: it holds the template's own variables only",
                f"chat_template_kwargs.{name}",
            )


def _choose_template(turn: ChatTurn, context: JobContext) -> ChatTemplate:
    if turn.chat_template is not None:
        if not context.trusts_templates:
            raise Unsupported("chat_template needs a server with --trust-request-chat-template", "chat_template")
        if not context.is_worker:
            raise NeedsWorker
        return ChatTemplate.from_request(turn.chat_template, context.model.tokenizer.named_tokens)
    if context.model.template is None:
        raise InvalidRequest("this model has no chat template; set --chat-template", turn.param)
    return context.model.template


def _name_reasoning(message: Message, template: ChatTemplate) -> Message:
    """Move the message's reasoning to the name that the template uses."""
    if "reasoning" not in message:
        return message
    name = next((name for name in REASONING_FIELDS if name in template.message_fields), "reasoning")
    return {key: value for key, value in message.items() if key != "reasoning"} | {name: message["reasoning"]}


def _describe_tool(tool: Tool) -> dict[str, object]:
    """Convert the tool to the form that templates expect."""
    function: dict[str, object] = {"name": tool.name, "parameters": tool.parameters}
    if tool.description:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _build_reply_format(turn: ChatTurn, text: str, context: JobContext) -> ReplyFormat | None:
    """Return None if everything that the model writes is content. Raises Unsupported."""
    dialect = context.model.dialect
    if turn.offers_calls and (dialect is None or dialect.calls is None):
        raise Unsupported(
            "tools are not supported: how this model writes tool calls is not known; set --dialect",
            "tools",
        )
    if turn.offers_calls and not _choose_template(turn, context).shows_tools:
        raise Unsupported(
            "tools are not supported: this model's chat template does not show them; set --chat-template",
            "tools",
        )
    if dialect is None or not (dialect.reasoning or dialect.content or (turn.tools and dialect.calls)):
        return None
    requires_call = turn.offers_calls and turn.tool_choice.mode == "required"
    return ReplyFormat(
        tools=json.dumps(msgspec.to_builtins(list(turn.tool_choice.select(turn.tools)))),
        in_reasoning=context.model.opens_reasoning(text),
        include_reasoning=turn.include_reasoning,
        has_named_tool=turn.tool_choice.is_named,
        requires_call=requires_call,
        content_has_form=turn.params.structured_outputs is not None and not requires_call,
        num_previous_calls=count_calls(turn.messages),
    )


def _find_grammar(turn: ChatTurn, reply: ReplyFormat | None, context: JobContext) -> str:
    """The grammar that the text must satisfy; empty if there is no restriction. Raises InvalidRequest,
    GrammarNeeded."""
    wanted = turn.params.structured_outputs
    if reply is None:
        return "" if wanted is None else context.find_grammar(wanted)
    if wanted is None and not turn.offers_calls:
        return ""
    if turn.params.ignore_eos:
        raise InvalidRequest("ignore_eos and tools exclude each other", "ignore_eos")
    return context.find_grammar(
        TurnForm(
            tools=tuple(turn.tools),
            tool_choice=turn.tool_choice,
            parallel_tool_calls=turn.parallel_tool_calls,
            in_reasoning=reply.in_reasoning,
            structured_outputs=wanted,
        )
    )


def drop_budget(params: SamplingParams, param: str | None, model: ServedModel) -> list[str]:
    """Remove a thinking budget given as a hint if the model has no known reasoning format.

    param: the field of the hint; None if there is none or the budget is no hint. Returns the fields without effect."""
    if param is None or (model.dialect is not None and model.dialect.reasoning is not None):
        return []
    params.thinking_token_budget = None
    return [param]


def _build_thinking_budget(turn: ChatTurn, reply: ReplyFormat, model: ServedModel) -> ThinkingBudget | None:
    budget = turn.params.thinking_token_budget
    if budget is None or budget == -1 or model.dialect is None or model.dialect.reasoning is None:
        return None
    reasoning = model.dialect.reasoning
    calls = model.dialect.calls

    def encode(*delimiters: Delimiter) -> list[tuple[int, ...]]:
        # The model may choose the whitespace around a delimiter.
        forms = [form.strip() for delimiter in delimiters for form in get_forms(delimiter)]
        return [tuple(model.tokenizer.encode(form, add_special_tokens=False)) for form in forms if form]

    close_ids, *other_close_ids = encode(reasoning.close)
    call_open_ids: list[tuple[int, ...]] = []
    call_close_ids: list[tuple[int, ...]] = []
    if calls is not None:
        call_open_ids = encode(calls.section_open) or encode(calls.open)
        call_close_ids = encode(calls.section_close) or encode(calls.close)
    # Structured content can contain a delimiter's text only inside strings.
    repeats = reasoning.repeats and turn.params.structured_outputs is None
    return ThinkingBudget(
        num_tokens=budget,
        close_ids=close_ids,
        other_close_ids=tuple(other_close_ids),
        open_ids=tuple(encode(reasoning.open)),
        is_open=reply.in_reasoning,
        ends_at_call=reasoning.ends_at_call,
        repeats=repeats,
        call_open_ids=tuple(call_open_ids),
        call_close_ids=tuple(call_close_ids),
    )


def _count_tokens_with_logprobs(params: SamplingParams, max_logprobs: int) -> int:
    """Tokens per choice whose log-probabilities fit the limit: the default of max_tokens if there is no other limit."""
    return max(1, max_logprobs // (((params.max_logprobs or 0) + 1) * params.n))
