"""Small chat templates, one per built-in dialect, that write turns like the published ones."""

from __future__ import annotations

from typing import NamedTuple

_FRAME = (
    "{{% if tools %}}[tools] {{{{ tools | tojson }}}}{{% endif %}}"
    "{{% for m in messages %}}"
    "{{% if m.role == 'assistant' %}}{header}"
    "{{% set calls = (m.tool_calls or []) | map(attribute='function') | list %}}"
    "{{% if m.reasoning_content %}}{reasoning}{{% endif %}}"
    "{{% if m.content %}}{content}{{% endif %}}"
    "{{% if calls %}}{calls}{{% endif %}}{end}"
    "{{% else %}}[{{{{ m.role }}}}] {{{{ m.content }}}}\n{{% endif %}}"
    "{{% endfor %}}"
    "{{% if add_generation_prompt %}}{header}{{% endif %}}"
)


class SmallTemplate(NamedTuple):
    """Parts of a template, in Jinja: `m` is a message, `calls` its functions, `c` one of them."""

    calls: str
    reasoning: str = ""
    content: str = "{{ m.content }}"
    header: str = "<|im_start|>assistant\n"
    end: str = "<|im_end|>\n"

    def write(self) -> str:
        """Return the source. Newlines after a tag, which Jinja drops, become expressions."""
        source = _FRAME.format(
            header=self.header,
            reasoning=self.reasoning,
            content=self.content,
            calls=self.calls,
            end=self.end,
        )
        return source.replace("%}\n", "%}{{ '\\n' }}")


def _each(body: str, separator: str = "") -> str:
    between = "{% if not loop.last %}" + separator + "{% endif %}" if separator else ""
    return "{% for c in calls %}" + body + between + "{% endfor %}"


def _items(body: str, separator: str = "") -> str:
    between = "{% if not loop.last %}" + separator + "{% endif %}" if separator else ""
    return "{% for k, v in c.arguments.items() %}" + body + between + "{% endfor %}"


def _object(name: str = "name", arguments: str = "arguments") -> str:
    return '{"' + name + '": "{{ c.name }}", "' + arguments + '": {{ c.arguments | tojson }}}'


_VALUE = "{{ v if v is string else v | tojson }}"
_NEWLINE = "{% if m.content %}\n{% endif %}"
_THINK = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
_THINK_INLINE = "<think>{{ m.reasoning_content }}</think>"
_HERMES = _NEWLINE + _each("<tool_call>\n" + _object() + "\n</tool_call>", "\n")
_CODER = _NEWLINE + _each(
    "<tool_call>\n<function={{ c.name }}>\n"
    + _items("<parameter={{ k }}>\n" + _VALUE + "\n</parameter>\n")
    + "</function>\n</tool_call>",
    "\n",
)
_ARRAY = "[" + _each(_object(), ", ") + "]"
_PYTHON = _each("{{ c.name }}(" + _items("{{ k }}={{ v | tojson }}", ", ") + ")", ", ")
_MISTRAL_END = "</s>"
_LLAMA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_GRANITE_HEADER = "<|start_of_role|>assistant<|end_of_role|>"
_DEEPSEEK_HEADER = "<｜Assistant｜>"
_DEEPSEEK_END = "<｜end▁of▁sentence｜>"


def _dsml(section: str) -> str:
    parameter = (
        "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
        + _VALUE
        + "</｜DSML｜parameter>\n"
    )
    return (
        f"\n\n<｜DSML｜{section}>\n"
        + _each('<｜DSML｜invoke name="{{ c.name }}">\n' + _items(parameter) + "</｜DSML｜invoke>", "\n")
        + f"\n</｜DSML｜{section}>"
    )


def _gemma(opening: str, quote: str, closing: str) -> str:
    value = "{{ '" + quote + "' + v + '" + quote + "' if v is string else v | tojson }}"
    return _each(opening + "{{ c.name }}{{ '{' }}" + _items("{{ k }}:" + value, ",") + "}" + closing)


TEMPLATES: dict[str, SmallTemplate] = {
    "hermes": SmallTemplate(_HERMES),
    "qwen3": SmallTemplate(_HERMES, _THINK),
    "qwen3_coder": SmallTemplate(_CODER),
    "qwen3_5": SmallTemplate(_CODER, _THINK),
    "seed_oss": SmallTemplate(
        _NEWLINE
        + _each(
            "<seed:tool_call>\n<function={{ c.name }}>\n"
            + _items("<parameter={{ k }}>" + _VALUE + "</parameter>\n")
            + "</function>\n</seed:tool_call>",
            "\n",
        ),
        "<seed:think>{{ m.reasoning_content }}</seed:think>\n",
        end="<seed:eos>",
    ),
    "llama3": SmallTemplate(
        "{% if calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
        + _each(_object(arguments="parameters")),
        content="{% if not calls %}{{ m.content }}{% endif %}",
        header=_LLAMA_HEADER,
        end="<|eot_id|>",
    ),
    "llama3_pythonic": SmallTemplate(
        "[" + _PYTHON + "]",
        content="{% if not calls %}{{ m.content }}{% endif %}",
        header=_LLAMA_HEADER,
        end="<|eot_id|>",
    ),
    "llama4": SmallTemplate(
        "<|python_start|>[" + _PYTHON + "]<|python_end|>",
        content="{% if not calls %}{{ m.content }}{% endif %}",
        header="<|header_start|>assistant<|header_end|>\n\n",
        end="<|eot|>",
    ),
    "olmo3": SmallTemplate(
        "<function_calls>\n"
        + _each("{{ c.name }}(" + _items("{{ k }}={{ v | tojson }}", ", ") + ")", "\n")
        + "\n</function_calls>",
        _THINK_INLINE,
    ),
    "lfm2": SmallTemplate("<|tool_call_start|>[" + _PYTHON + "]<|tool_call_end|>", _THINK_INLINE),
    "mistral_array": SmallTemplate("[TOOL_CALLS] " + _ARRAY, header="[/INST]", end=_MISTRAL_END),
    "mistral": SmallTemplate(
        _each("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}"),
        "[THINK]{{ m.reasoning_content }}[/THINK]",
        header="[/INST]",
        end=_MISTRAL_END,
    ),
    "mistral_ids": SmallTemplate(
        "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]"
        "{{ call.function.arguments | tojson }}{% endfor %}",
        "[THINK]{{ m.reasoning_content }}[/THINK]",
        header="[/INST]",
        end=_MISTRAL_END,
    ),
    "deepseek_v3": SmallTemplate(
        "<｜tool▁calls▁begin｜>"
        + _each(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n{{ c.arguments | tojson }}\n```"
            "<｜tool▁call▁end｜>",
            "\n",
        )
        + "<｜tool▁calls▁end｜>",
        _THINK,
        header=_DEEPSEEK_HEADER,
        end=_DEEPSEEK_END,
    ),
    "deepseek_v3_1": SmallTemplate(
        "<｜tool▁calls▁begin｜>"
        + _each("<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>",
        _THINK_INLINE,
        header=_DEEPSEEK_HEADER,
        end=_DEEPSEEK_END,
    ),
    "deepseek_v3_2": SmallTemplate(_dsml("function_calls"), _THINK_INLINE, header=_DEEPSEEK_HEADER, end=_DEEPSEEK_END),
    "deepseek_v4": SmallTemplate(_dsml("tool_calls"), _THINK_INLINE, header=_DEEPSEEK_HEADER, end=_DEEPSEEK_END),
    "glm4_5": SmallTemplate(
        _each(
            "\n<tool_call>{{ c.name }}\n"
            + _items("<arg_key>{{ k }}</arg_key>\n<arg_value>" + _VALUE + "</arg_value>\n")
            + "</tool_call>"
        ),
        "\n<think>{{ m.reasoning_content }}</think>",
        "\n{{ m.content }}",
        header="<|assistant|>",
        end="<|user|>",
    ),
    "glm4_7": SmallTemplate(
        _each(
            "<tool_call>{{ c.name }}"
            + _items("<arg_key>{{ k }}</arg_key><arg_value>" + _VALUE + "</arg_value>")
            + "</tool_call>"
        ),
        _THINK_INLINE,
        header="<|assistant|>",
        end="<|user|>",
    ),
    "kimi_k2": SmallTemplate(
        "<|tool_calls_section_begin|>{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}"
        "<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
        "<|tool_calls_section_end|>",
        _THINK_INLINE,
        header="<|im_assistant|>assistant<|im_middle|>",
        end="<|im_end|>",
    ),
    "harmony": SmallTemplate(
        "{% if m.content or m.reasoning_content %}<|start|>assistant{% endif %}"
        + _each(
            " to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}<|call|>",
            "<|start|>assistant",
        ),
        "<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>",
        "{% if m.reasoning_content %}<|start|>assistant{% endif %}"
        "<|channel|>{{ 'commentary' if calls else 'final' }}<|message|>{{ m.content }}<|end|>",
        header="<|start|>assistant",
        end="",
    ),
    "minimax_m2": SmallTemplate(
        "\n<minimax:tool_call>\n"
        + _each(
            '<invoke name="{{ c.name }}">\n'
            + _items('<parameter name="{{ k }}">' + _VALUE + "</parameter>\n")
            + "</invoke>\n"
        )
        + "</minimax:tool_call>",
        _THINK,
        header="]~b]ai\n",
        end="[e~[\n",
    ),
    "granite3": SmallTemplate(
        "<|tool_call|>" + _ARRAY,
        "Here is my thought process:{{ m.reasoning_content }}Here is my response:",
        header=_GRANITE_HEADER,
        end="<|end_of_text|>\n",
    ),
    "granite3_3": SmallTemplate(
        "<|tool_call|>" + _ARRAY,
        _THINK_INLINE,
        "<response>{{ m.content }}</response>",
        header=_GRANITE_HEADER,
        end="<|end_of_text|>\n",
    ),
    "granite_20b": SmallTemplate(
        _NEWLINE + _each("<function_call> " + _object(), "\n"), header="ASSISTANT:\n", end="<|endoftext|>\n"
    ),
    "phi4_mini": SmallTemplate("<|tool_call|>" + _ARRAY + "<|/tool_call|>", header="<|assistant|>", end="<|end|>"),
    "functools": SmallTemplate("functools" + _ARRAY, header="<|assistant|>", end="<|end|>"),
    "jamba": SmallTemplate(_NEWLINE + "<tool_calls>" + _ARRAY + "</tool_calls>", end="<|eom|>"),
    "hunyuan": SmallTemplate(
        "<tool_calls>" + _ARRAY + "</tool_calls>",
        "<think>\n{{ m.reasoning_content }}\n</think>\n",
        "<answer>\n{{ m.content }}\n</answer>",
        header="<|extra_0|>",
        end="<|eos|>",
    ),
    "apriel": SmallTemplate(
        _NEWLINE + "<tool_calls>" + _ARRAY + "</tool_calls>",
        "Here are my reasoning steps:\n{{ m.reasoning_content }}\n[BEGIN FINAL RESPONSE]\n",
        header="<|begin_assistant|>\n",
        end="\n<|end|>\n",
    ),
    "minimax_m1": SmallTemplate(
        _NEWLINE + "<tool_calls>\n" + _each(_object() + "\n") + "</tool_calls>", _THINK, end="<end_of_sentence>\n"
    ),
    "nemotron_nano2": SmallTemplate(_NEWLINE + "<TOOLCALL>" + _ARRAY + "</TOOLCALL>", _THINK, end="<SPECIAL_12>\n"),
    "command": SmallTemplate(
        "<|START_ACTION|>[\n    "
        + _each(
            '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.name }}", '
            '"parameters": {{ c.arguments | tojson }}}',
            ",\n    ",
        )
        + "\n]<|END_ACTION|>",
        "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>",
        "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>",
        header="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        end="<|END_OF_TURN_TOKEN|>",
    ),
    "command_r": SmallTemplate(
        _NEWLINE + "Action: ```json\n[\n    " + _each(_object("tool_name", "parameters"), ",\n    ") + "\n]```",
        header="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        end="<|END_OF_TURN_TOKEN|>",
    ),
    "gemma4": SmallTemplate(
        _gemma("<|tool_call>call:", '<|"|>', "<tool_call|>"),
        "<|channel>thought\n{{ m.reasoning_content }}<channel|>",
        header="<|turn>model\n",
        end="<turn|>\n",
    ),
    "function_gemma": SmallTemplate(
        _gemma("<start_function_call>call:", "<escape>", "<end_function_call>"),
        header="<start_of_turn>model\n",
        end="<end_of_turn>\n",
    ),
    "functionary": SmallTemplate(
        _each("<function={{ c.name }}>{{ c.arguments | tojson }}</function>"), header=_LLAMA_HEADER, end="<|eom_id|>"
    ),
    "internlm2": SmallTemplate(
        _each("<|action_start|><|plugin|>\n" + _object(arguments="parameters") + "<|action_end|>", "\n")
    ),
    "gigachat3": SmallTemplate(
        "{% set c = calls[0] %}<|message_sep|>\n\nfunction call<|role_sep|>\n" + _object(),
        header="assistant<|role_sep|>\n",
        end="<|message_sep|>\n\n",
    ),
    "gigachat3_1": SmallTemplate(
        _each("<|function_call|>" + _object()), header="assistant<|role_sep|>\n", end="<|message_sep|>\n\n"
    ),
    "xlam": SmallTemplate(_ARRAY, content="{% if not calls %}{{ m.content }}{% endif %}"),
}
