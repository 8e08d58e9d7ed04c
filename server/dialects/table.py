"""The built-in dialects: how the published model families write reasoning and calls."""

from __future__ import annotations

from collections.abc import Iterable

from serve_llm.server.dialects.dialect import (
    CallFormat,
    ContentFormat,
    Dialect,
    GemmaCodec,
    JsonCodec,
    PythonicCodec,
    ReasoningFormat,
    TaggedCodec,
)

_OBJECT = JsonCodec(name_key="name")
_LLAMA_OBJECT = JsonCodec(name_key="name", arguments_key="parameters")
_COMMAND_OBJECT = JsonCodec(name_key="tool_name", arguments_key="parameters", id_key="tool_call_id")

_THINK = ReasoningFormat(open="<think>\n", close="\n</think>\n\n")
_THINK_INLINE = ReasoningFormat(open="<think>", close="</think>")
_THINK_UNTIL_CALL = ReasoningFormat(open="<think>\n", close="\n</think>\n\n", ends_at_call=True)
_MISTRAL_THINK = ReasoningFormat(open="[THINK]", close="[/THINK]", repeats=True)
_GRANITE_THINK = ReasoningFormat(
    open=("Here is my thought process:", "Here's my thought process:"),
    close=("Here is my response:", "Here's my response:"),
)

_HERMES = CallFormat(codec=_OBJECT, open="<tool_call>\n", close="\n</tool_call>", separator="\n")
_QWEN_CODER = CallFormat(
    codec=TaggedCodec(key_open="<parameter=", key_end=">\n", value_end="\n</parameter>\n"),
    open=("<tool_call>\n<function=", "<function="),
    name_end=">\n",
    close=("</function>\n</tool_call>", "</function>"),
    separator="\n",
)
_SEED = CallFormat(
    codec=TaggedCodec(key_open="<parameter=", key_end=">", value_end="</parameter>\n"),
    open="<seed:tool_call>\n<function=",
    name_end=">\n",
    close="</function>\n</seed:tool_call>",
    separator="\n",
)
_LLAMA_JSON = CallFormat(codec=_LLAMA_OBJECT, section_open=("", "<|python_tag|>"), separator="; ", is_bare=True)
_PYTHONIC = CallFormat(
    codec=PythonicCodec(), section_open="[", section_close="]", name_end="(", close=")", separator=", ", is_bare=True
)
_GIGACHAT = CallFormat(
    codec=_OBJECT,
    open=("<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n"),
)
_XLAM = CallFormat(codec=_OBJECT, section_open="[", section_close="]", separator=", ", is_bare=True)
_LLAMA4 = CallFormat(
    codec=PythonicCodec(),
    section_open=("[", "<|python_start|>["),
    section_close=("]", "]<|python_end|>"),
    name_end="(",
    close=")",
    separator=", ",
    is_bare=True,
)
_OLMO = CallFormat(
    codec=PythonicCodec(json_literals=True),
    section_open="<function_calls>\n",
    section_close="\n</function_calls>",
    name_end="(",
    close=")",
    separator="\n",
)
_LFM2 = CallFormat(
    codec=PythonicCodec(),
    section_open="<|tool_call_start|>[",
    section_close="]<|tool_call_end|>",
    name_end="(",
    close=")",
    separator=", ",
)
_MISTRAL_ARRAY = CallFormat(
    codec=_OBJECT, section_open="[TOOL_CALLS] [", section_close="]", separator=", ", id_rule="mistral"
)
_MISTRAL = CallFormat(codec=JsonCodec(), open="[TOOL_CALLS]", name_end="[ARGS]", id_rule="mistral")
_MISTRAL_WITH_IDS = CallFormat(
    codec=JsonCodec(), open="[TOOL_CALLS]", id_open="[CALL_ID]", name_end="[ARGS]", id_rule="mistral"
)
_DEEPSEEK_V3 = CallFormat(
    codec=JsonCodec(),
    section_open="<｜tool▁calls▁begin｜>",
    open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    name_end="\n```json\n",
    close="\n```<｜tool▁call▁end｜>",
    separator="\n",
    section_close="<｜tool▁calls▁end｜>",
)
_DEEPSEEK_V31 = CallFormat(
    codec=JsonCodec(),
    section_open="<｜tool▁calls▁begin｜>",
    open="<｜tool▁call▁begin｜>",
    name_end="<｜tool▁sep｜>",
    close="<｜tool▁call▁end｜>",
    section_close="<｜tool▁calls▁end｜>",
)
_GLM45 = CallFormat(
    codec=TaggedCodec(key_open="<arg_key>", key_end="</arg_key>\n<arg_value>", value_end="</arg_value>\n"),
    open="<tool_call>",
    name_end="\n",
    close="</tool_call>",
    separator="\n",
)
_GLM47 = CallFormat(
    codec=TaggedCodec(key_open="<arg_key>", key_end="</arg_key><arg_value>", value_end="</arg_value>"),
    open="<tool_call>",
    close="</tool_call>",
)
_KIMI = CallFormat(
    codec=JsonCodec(),
    section_open="<|tool_calls_section_begin|>",
    open="<|tool_call_begin|>functions.",
    id_open=":",
    name_end="<|tool_call_argument_begin|>",
    close="<|tool_call_end|>",
    section_close="<|tool_calls_section_end|>",
    id_rule="kimi",
)
_HARMONY = CallFormat(
    codec=JsonCodec(),
    open=(
        "<|channel|>commentary to=functions.",
        "to=functions.",
        "<|channel|>analysis to=functions.",
        "<|channel|>commentary to=",  # tools that OpenAI's models know by themselves, as in `to=browser.search`
        "<|channel|>analysis to=",
    ),
    name_end=(
        " <|constrain|>json<|message|>",
        "<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>commentary json<|message|>",
        "<|channel|>commentary<|message|>",
        " json<|message|>",
        " code<|message|>",
        "<|message|>",
    ),
    close=("<|call|>", "<|end|>"),
)
_MINIMAX = CallFormat(
    codec=TaggedCodec(key_open='<parameter name="', key_end='">', value_end="</parameter>\n"),
    lead="\n",
    section_open="<minimax:tool_call>\n",
    open='<invoke name="',
    name_end='">\n',
    close="</invoke>",
    separator="\n",
    section_close="\n</minimax:tool_call>",
)
_GEMMA4 = CallFormat(codec=GemmaCodec(quote='<|"|>'), open="<|tool_call>call:", close="<tool_call|>")
_FUNCTION_GEMMA = CallFormat(
    codec=GemmaCodec(quote="<escape>"), open="<start_function_call>call:", close="<end_function_call>"
)
_FUNCTIONARY = CallFormat(codec=JsonCodec(), open="<function=", name_end=">", close="</function>")


def _build_dsml(section: str) -> CallFormat:
    """DeepSeek's markup of calls, within a section of this name."""
    return CallFormat(
        codec=TaggedCodec(
            key_open='<｜DSML｜parameter name="',
            key_end='" string="true">',
            json_key_end='" string="false">',
            value_end="</｜DSML｜parameter>\n",
        ),
        lead="\n\n",
        section_open=f"<｜DSML｜{section}>\n",
        open='<｜DSML｜invoke name="',
        name_end='">\n',
        close="</｜DSML｜invoke>",
        separator="\n",
        section_close=f"\n</｜DSML｜{section}>",
    )


def _build_array(*brackets: tuple[str, str]) -> CallFormat:
    """A JSON array of objects with name and arguments; brackets: what opens and closes it."""
    return CallFormat(
        codec=_OBJECT,
        section_open=tuple(opening for opening, _ in brackets),
        section_close=tuple(closing for _, closing in brackets),
        separator=", ",
    )


def _index(dialects: Iterable[Dialect]) -> dict[str, Dialect]:
    return {dialect.name: dialect for dialect in dialects}


_GRANITE = _build_array(("<|tool_call|>[", "]"), ("<tool_call>[", "]"))
_TOOL_CALLS_ARRAY = _build_array(("<tool_calls>[", "]</tool_calls>"))

_IM_END = ("<|im_end|>",)
_DEEPSEEK_END = ("<｜end▁of▁sentence｜>",)
_GLM_ENDS = ("<|observation|>", "<|user|>", "<|endoftext|>")
_LLAMA_ENDS = ("<|eot_id|>", "<|eom_id|>")
_GRANITE_END = ("<|end_of_text|>",)

BUILT_IN: dict[str, Dialect] = _index(
    [
        Dialect(name="hermes", calls=_HERMES, ends=_IM_END),  # Hermes, Qwen2.5, Granite 4, Qwen3-Instruct
        Dialect(name="qwen3", reasoning=_THINK, calls=_HERMES, ends=_IM_END),  # Qwen3, QwQ, SmolLM3, EXAONE 4
        Dialect(name="qwen3_coder", calls=_QWEN_CODER, ends=_IM_END),
        Dialect(name="qwen3_5", reasoning=_THINK_UNTIL_CALL, calls=_QWEN_CODER, ends=_IM_END),  # Nemotron 3, Step 3.5
        Dialect(
            name="seed_oss",
            reasoning=ReasoningFormat(open="<seed:think>", close="</seed:think>\n"),
            calls=_SEED,
            ends=("<seed:eos>",),
        ),
        Dialect(name="llama3", calls=_LLAMA_JSON, ends=_LLAMA_ENDS),
        Dialect(name="llama3_pythonic", calls=_PYTHONIC, ends=_LLAMA_ENDS),  # Llama 3.2, ToolACE
        Dialect(name="llama4", calls=_LLAMA4, ends=("<|eot|>", "<|eom|>")),
        Dialect(name="olmo3", reasoning=_THINK_INLINE, calls=_OLMO, ends=_IM_END),
        Dialect(name="lfm2", reasoning=_THINK_INLINE, calls=_LFM2, ends=_IM_END),
        Dialect(name="mistral_array", calls=_MISTRAL_ARRAY, ends=("</s>",)),  # before the tokenizer's version 11
        Dialect(name="mistral", reasoning=_MISTRAL_THINK, calls=_MISTRAL, ends=("</s>",)),
        Dialect(name="mistral_ids", reasoning=_MISTRAL_THINK, calls=_MISTRAL_WITH_IDS, ends=("</s>",)),  # version 11
        Dialect(name="deepseek_v3", reasoning=_THINK, calls=_DEEPSEEK_V3, ends=_DEEPSEEK_END),  # also R1
        Dialect(name="deepseek_v3_1", reasoning=_THINK_INLINE, calls=_DEEPSEEK_V31, ends=_DEEPSEEK_END),
        Dialect(name="deepseek_v3_2", reasoning=_THINK_INLINE, calls=_build_dsml("function_calls"), ends=_DEEPSEEK_END),
        Dialect(name="deepseek_v4", reasoning=_THINK_INLINE, calls=_build_dsml("tool_calls"), ends=_DEEPSEEK_END),
        Dialect(
            name="glm4_5",
            reasoning=ReasoningFormat(open="\n<think>", close="</think>\n", ends_at_call=True),
            calls=_GLM45,
            ends=_GLM_ENDS,
        ),
        Dialect(
            name="glm4_7",
            reasoning=ReasoningFormat(open="<think>", close="</think>", ends_at_call=True),
            calls=_GLM47,
            ends=_GLM_ENDS,
        ),
        Dialect(name="kimi_k2", reasoning=_THINK_INLINE, calls=_KIMI, ends=("<|im_end|>",)),
        Dialect(
            name="harmony",
            reasoning=ReasoningFormat(open="<|channel|>analysis<|message|>", close="<|end|>", repeats=True),
            content=ContentFormat(
                open=(
                    "<|channel|>final<|message|>",
                    "<|channel|>commentary<|message|>",
                    "<|channel|>final <|constrain|>json<|message|>",
                ),
                close=("<|return|>", "<|end|>"),
            ),
            calls=_HARMONY,
            start="<|start|>assistant",
            ends=("<|return|>", "<|call|>"),
        ),
        Dialect(name="minimax_m2", reasoning=_THINK, calls=_MINIMAX, ends=("[e~[",)),
        Dialect(
            name="granite3",
            reasoning=_GRANITE_THINK,
            calls=_GRANITE,
            ends=_GRANITE_END,
        ),
        Dialect(
            name="granite3_3",
            reasoning=_THINK_INLINE,
            content=ContentFormat(open="<response>", close="</response>"),
            calls=_GRANITE,
            ends=_GRANITE_END,
        ),
        Dialect(
            name="granite_20b",
            calls=CallFormat(codec=_OBJECT, open="<function_call> ", separator="\n"),
            ends=("<|endoftext|>",),
        ),
        Dialect(name="phi4_mini", calls=_build_array(("<|tool_call|>[", "]<|/tool_call|>")), ends=("<|end|>",)),
        Dialect(name="functools", calls=_build_array(("functools[", "]")), ends=("<|end|>",)),
        Dialect(name="jamba", calls=_TOOL_CALLS_ARRAY, ends=("<|eom|>",)),
        Dialect(
            name="hunyuan",
            reasoning=ReasoningFormat(open="<think>\n", close="\n</think>\n"),
            content=ContentFormat(open="<answer>\n", close="\n</answer>"),
            calls=_TOOL_CALLS_ARRAY,
            ends=("<|eos|>",),
        ),
        Dialect(
            name="apriel",
            reasoning=ReasoningFormat(open="Here are my reasoning steps:\n", close="\n[BEGIN FINAL RESPONSE]\n"),
            calls=_TOOL_CALLS_ARRAY,
            ends=("<|end|>",),
        ),
        Dialect(
            name="minimax_m1",
            reasoning=_THINK,
            calls=CallFormat(
                codec=_OBJECT, section_open="<tool_calls>\n", separator="\n", section_close="\n</tool_calls>"
            ),
            ends=("<end_of_sentence>",),
        ),
        Dialect(name="nemotron_nano2", reasoning=_THINK, calls=_build_array(("<TOOLCALL>[", "]</TOOLCALL>"))),
        Dialect(
            name="command",
            reasoning=ReasoningFormat(open="<|START_THINKING|>", close="<|END_THINKING|>"),
            content=ContentFormat(open="<|START_RESPONSE|>", close="<|END_RESPONSE|>"),
            calls=CallFormat(
                codec=_COMMAND_OBJECT,
                section_open="<|START_ACTION|>[\n    ",
                section_close="\n]<|END_ACTION|>",
                separator=",\n    ",
            ),
            ends=("<|END_OF_TURN_TOKEN|>",),
        ),
        Dialect(
            name="command_r",
            calls=CallFormat(
                codec=JsonCodec(name_key="tool_name", arguments_key="parameters"),
                section_open="Action: ```json\n[\n    ",
                section_close="\n]```",
                separator=",\n    ",
            ),
            ends=("<|END_OF_TURN_TOKEN|>",),
        ),
        Dialect(
            name="gemma4",
            reasoning=ReasoningFormat(open="<|channel>thought\n", close="<channel|>", repeats=True),
            calls=_GEMMA4,
            ends=("<turn|>", "<|tool_response>"),
        ),
        Dialect(name="function_gemma", calls=_FUNCTION_GEMMA, ends=("<end_of_turn>", "<start_function_response>")),
        Dialect(name="functionary", calls=_FUNCTIONARY, ends=_LLAMA_ENDS),  # version 3.1
        Dialect(
            name="internlm2",
            calls=CallFormat(
                codec=_LLAMA_OBJECT, open="<|action_start|><|plugin|>\n", close="<|action_end|>", separator="\n"
            ),
            ends=_IM_END,
        ),
        Dialect(name="gigachat3", calls=_GIGACHAT),
        Dialect(
            name="gigachat3_1", calls=CallFormat(codec=_OBJECT, open="<|function_call|>"), ends=("<|message_sep|>",)
        ),
        Dialect(name="xlam", calls=_XLAM),
    ]
)
"""By name. Where several explain a chat template equally well, the first does."""
