"""Chat templates with the conventions of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.prompt.template import PROBE_TOOL, ChatTemplate, load_template

PLAIN = (
    "{{ bos_token }}{% for message in messages %}\n"
    "[{{ message.role }}] {{ message.content }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, "}]


def render(source: str, messages: list[dict[str, object]] = TALK, **options: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_blocks_are_trimmed_and_named_tokens_known() -> None:
    assert render(PLAIN) == "<s>[user] Hi\n[assistant] Hello, \n[assistant]"
    assert render("  {% if true %}x{% endif %}") == "x"


def test_continuing_ends_within_the_final_message() -> None:
    assert render(PLAIN, continue_final_message=True) == "<s>[user] Hi\n[assistant] Hello, "


def test_continuing_a_trimmed_message_has_no_space_that_the_template_drops() -> None:
    trimming = "{% for message in messages %}<{{ message.content | trim }}>{% endfor %}"
    assert render(trimming, continue_final_message=True) == "<Hi><Hello,"


def test_continuing_what_the_template_leaves_out_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="does not render"):
        render("{{ messages[0].content }}", continue_final_message=True)


PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}[{{ p.text }}{{ '/' + p.lang if p.lang }}]{% endfor %}"
    "{% endfor %}"
)


def test_a_template_that_walks_parts_gets_parts() -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, "}]
    assert render(PARTS, talk) == "user:[Hi]assistant:[Hello, ]"
    assert render(PARTS, talk, continue_final_message=True) == "user:[Hi]assistant:[Hello, "
    parts = [{"type": "text", "text": "a", "lang": "de"}, {"type": "text", "text": "b"}]
    assert render(PARTS, [{"role": "user", "content": parts}]) == "user:[a/de][b]"
    assert render(PARTS, [{"role": "user", "content": parts}], continue_final_message=True) == "user:[a/de][b"
    assert render(PARTS, [{"role": "user", "content": parts[1:] * 2}]) == "user:[b\nb]", "what is text only is joined"
    assert render(PARTS, [{"role": "user", "content": []}], continue_final_message=True) == "user:["
    assert render(PARTS, [{"role": "user", "content": parts[:1] * 2}]) == "user:[a/de][a/de]"


def test_a_template_that_takes_texts_gets_texts() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    assert render(PLAIN, [{"role": "user", "content": parts}]) == "<s>[user] a\nb\n[assistant]"


def test_the_form_of_contents_can_be_chosen() -> None:
    talk = [{"role": "user", "content": [{"type": "text", "text": "a", "lang": "de"}, {"type": "text", "text": "b"}]}]
    assert render(PARTS, talk, content_format="openai") == "user:[a/de][b]"
    assert render("{{ messages[0].content }}", talk, content_format="string") == "a\nb"
    shape = "{{ 'text' if messages[0].content is string else messages[0].content | length }}"
    assert render(shape, talk) == "text"
    assert render(shape, talk, content_format="openai") == "2"
    assert render(shape, [{"role": "user", "content": "a"}], content_format="openai") == "1"
    assert render("{% for p in messages[0].content %}{{ p.lang }}.{% endfor %}", talk, content_format="string") == "..."


def test_json_is_not_escaped_for_html() -> None:
    value = "<\u00e9>&'"
    assert render("{{ messages[0].content | tojson }}", [{"role": "user", "content": value}]) == f'"{value}"'
    assert render("{{ messages[0] | tojson(indent=1) }}", [{"role": "user"}]) == '{\n "role": "user"\n}'


def test_extensions_of_transformers() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}x{% endgeneration %}"
    )
    assert render(source) == "01x"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_variables_of_the_request_reach_the_template_but_not_its_messages() -> None:
    assert render("{{ thinking }}{{ messages | length }}", kwargs={"thinking": "no", "messages": []}) == "no2"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "failed on these messages"),
        ("{{ messages[9].content.x }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set x = messages.append(1) %}", "unsafe"),
    ],
)
def test_what_a_template_refuses_is_the_users_error(source: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_broken_template_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="not valid Jinja"):
        ChatTemplate("{% if %}", {})


def write(directory: Path, name: str, content: object) -> None:
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_sources_of_a_checkpoint_in_order(tmp_path: Path) -> None:
    def found() -> str | None:
        template = load_template(None, tmp_path, {})
        return None if template is None else template.render([])

    assert found() is None
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config"})
    assert found() == "config"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": several})
    assert found() == "default"
    write(tmp_path, "chat_template.json", {"chat_template": "json"})
    assert found() == "json"
    write(tmp_path, "chat_template.jinja", "jinja")
    assert found() == "jinja"


def test_the_template_for_tools_is_used_when_tools_are_given(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "with tools"}, {"name": "default", "template": "plain"}]
    for number, add in enumerate(("list", "file")):
        directory = tmp_path / str(number)
        directory.mkdir()
        if add == "list":
            write(directory, "tokenizer_config.json", {"chat_template": named})
        else:
            write(directory, "chat_template.jinja", "plain")
            (directory / "additional_chat_templates").mkdir()
            write(directory / "additional_chat_templates", "tool_use.jinja", "with tools")
        template = load_template(None, directory, {})
        assert template is not None
        assert template.render([]) == "plain"
        assert template.render([], tools=[PROBE_TOOL]) == "with tools"
        assert template.render([], kwargs={"tools": [PROBE_TOOL]}) == "with tools"
        assert template.tool_source == "with tools"


def test_whether_a_template_shows_tools() -> None:
    assert ChatTemplate("{{ tools | tojson }}", {}).shows_tools
    assert ChatTemplate("{{ messages | length }}", {}, tool_source="{{ tools[0].function.name }}").shows_tools
    assert ChatTemplate("{% if messages[0].role == 'system' %}{{ tools }}{% endif %}", {}).shows_tools
    assert ChatTemplate("{% if xml_tools or python_tools %}{{ xml_tools or python_tools }}{% endif %}", {}).shows_tools
    assert not ChatTemplate("{{ messages | length }}", {}).shows_tools
    assert not ChatTemplate("{{ tools[0].nothing.nothing }}", {}).shows_tools


@pytest.mark.parametrize(
    ("written", "is_text"),
    [
        ("{{ call.function.arguments | tojson }}", False),
        ("{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}", False),
        ("{{ 'args: ' + call.function.arguments }}", True),
        ("{{ call.function.arguments }}", True),
    ],
)
def test_arguments_of_history_have_the_form_that_the_template_wants(written: str, is_text: bool) -> None:
    source = f"{{% for call in messages[-1].tool_calls %}}{written}{{% endfor %}}"
    template = ChatTemplate(source, {})
    assert template.wants_argument_text is is_text
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    message: dict[str, object] = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = template.render([message], add_generation_prompt=False)
    assert text.removeprefix("args: ") in ('{"a": "é"}', "a=é")
    assert call["function"] == {"name": "f", "arguments": {"a": "é"}}  # the request's own message is unchanged


def test_a_chosen_template_is_a_file_or_itself(tmp_path: Path) -> None:
    write(tmp_path, "chat_template.jinja", "the checkpoint's")
    write(tmp_path, "mine.jinja", "mine")
    (tmp_path / "marked.jinja").write_bytes(b"\xef\xbb\xbfmarked")
    paths = [(str(tmp_path / f"{name}.jinja"), name) for name in ("mine", "marked")]
    for chosen, text in (*paths, ("{{ 'inline' }}", "inline")):
        template = load_template(chosen, tmp_path, {})
        assert template is not None and template.render([]) == text
    with pytest.raises(OptionError, match="--chat-template"):
        load_template(str(tmp_path / "absent.jinja"), tmp_path, {})
