"""serve-llm chat without a terminal: the conversation, its commands, and how answers are shown."""

import io
import json
import sys
from pathlib import Path

import pytest

from serve_llm.cli.api_client import ApiClient, ApiError, normalize_url
from serve_llm.cli.chat import command
from serve_llm.cli.chat.display import ChatDisplay
from serve_llm.cli.chat.session import ChatSession, CommandError, StreamedCall
from serve_llm.cli.server_process import split_target
from serve_llm.common.errors import OptionError
from support.scripted_api import ScriptedApi, serve_script

CALL = {"index": 0, "id": "c1", "function": {"name": "find", "arguments": '{"a"'}}
REST = {"index": 0, "function": {"arguments": ": 1}"}}
TOOL_ANSWER = [{"reasoning": "hm"}, {"tool_calls": [CALL]}, {"tool_calls": [REST]}]


def chat(
    monkeypatch: pytest.MonkeyPatch, api: ScriptedApi, text: str, *arguments: str, environ: dict[str, str] | None = None
) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return command.main([api.url, *arguments], environ or {})


def test_stdin_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_script([[{"reasoning_content": "hm"}, {"content": "two "}, {"content": "words"}]]) as api:
        assert chat(monkeypatch, api, "a\nb\n", "--prompt", "Say:", "--system", "S", "--set", "temperature=0") == 0
    assert capsys.readouterr() == ("two words\n", ""), "reasoning is for terminals"
    assert api.bodies == [
        {
            "model": "scripted",
            "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Say:\n\na\nb"}],
            "stream": True,
            "temperature": 0,
        }
    ]


def test_names_of_vllms_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with serve_script([[{"content": "yes"}]]) as api:
        arguments = ["--url", api.url + "/v1", "--model-name", "m", "--system-prompt", "S", "-q", "well?"]
        assert command.main(arguments, {}) == 0
        with pytest.raises(OptionError, match="--url: the server is given twice"):
            command.main(["demo", "--url", api.url], {})
    assert capsys.readouterr().out == "yes\n"
    assert api.bodies[0]["model"] == "m" and [one["content"] for one in api.bodies[0]["messages"]] == ["S", "well?"]
    for arguments, words in (
        (["--url", "demo"], "--url: expected http://HOST:PORT"),
        (["http://h", "--keepalive", "5m"], "--keepalive is an option of Ollama: not needed"),
        (["http://h", "--zzz"], "unknown option --zzz; if it is one of a server"),
        (["--port", "9000"], "unknown option --port; give the server's URL first, as http://HOST:PORT"),
        (["http://h", "--sytem", "x"], r"unknown option --sytem; did you mean --system\?"),
        (["demo", "--max-modle-len", "1k"], r"unknown option --max-modle-len; did you mean --max-model-len\?"),
    ):
        with pytest.raises(OptionError, match=words):
            command.main(arguments, {})


@pytest.mark.parametrize("arguments", [(), ("--lines",)])
def test_bytes_of_stdin_that_are_no_text_are_replaced(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str]) -> None:
    with serve_script([[{"content": "x"}]]) as api:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9!\n"), encoding="utf-8"))
        assert command.main([api.url, *arguments], {}) == 0
    assert api.bodies[0]["messages"] == [{"role": "user", "content": "caf\ufffd!"}]


def test_lines_are_turns_and_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "/set max_tokens 5\none\n\ntwo\n/retry\n/reset\nthree\n/quit\nfour\n"
    with serve_script([[{"content": text}] for text in "ABCD"]) as api:
        environ = {"SERVE_LLM_API_KEY": "k1,k2"}
        assert chat(monkeypatch, api, lines, "--lines", "--model", "m", environ=environ) == 0
    assert capsys.readouterr().out == "A\nB\nC\nD\n"
    sent = [[message["content"] for message in body["messages"]] for body in api.bodies]
    assert sent == [["one"], ["one", "A", "two"], ["one", "A", "two"], ["three"]]
    assert all(body["model"] == "m" and body["max_tokens"] == 5 for body in api.bodies)


def test_tool_calls_are_shown_and_their_results_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_script([TOOL_ANSWER, [{"content": "done"}]]) as api:
        assert chat(monkeypatch, api, "look\nfound it\n", "--lines") == 0
    assert capsys.readouterr().out == 'find({"a": 1})\ndone\n'
    assert api.bodies[1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "found it"},
    ]


def test_an_error_ends_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = (400, {"error": {"message": "temperature: too hot"}})
    with serve_script([refusal, [{"content": "x"}, {"error": {"message": "the engine died"}}]]) as api:
        assert chat(monkeypatch, api, "one\ntwo\n", "--lines") == 1
        assert capsys.readouterr().err == (
            "serve-llm chat: temperature: too hot (status 400 of /v1/chat/completions)\n"
        )
        assert chat(monkeypatch, api, "one") == 1
    captured = capsys.readouterr()
    assert captured.out == "x\n" and captured.err == "serve-llm chat: the engine died\n"


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_script([]) as api:
        for arguments, words in (
            (["--zzz"], "unknown option --zzz"),
            (["--set", "messages=1"], "--set: messages is set by the chat itself"),
            ([], "no message"),
        ):
            with pytest.raises(OptionError, match=words):
                chat(monkeypatch, api, "", *arguments)
    with pytest.raises(OptionError, match="is not a URL"):
        command.main(["http://"], {})
    with pytest.raises(OptionError, match="--max-model-len: must be at least 1"):
        command.main(["demo", "--max-model-len", "0"], {})


def test_save_and_load(tmp_path: Path) -> None:
    session = ChatSession("m", "system", {"temperature": 0})
    session.add_user_message("hello")
    session.add_answer("answer", "", [])
    file = tmp_path / "chat.json"
    assert session.run_command(f"/save {file}") == f"saved 2 messages to {file}"
    other = ChatSession("m")
    assert other.run_command(f"/load {file}") == "loaded 2 messages"
    assert other.build_body() == session.build_body()
    for name, text in (("absent.json", None), ("bad.json", "{"), ("list.json", "[]"), ("odd.json", '{"messages": 1}')):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(CommandError):
            other.run_command(f"/load {tmp_path / name}")
    assert other.build_body() == session.build_body(), "a file that cannot be read changes nothing"


def test_commands(tmp_path: Path) -> None:
    session = ChatSession("m")
    assert "/set NAME VALUE" in session.run_command("/help")
    session.run_command("/set stop [1]")
    session.run_command("/set reasoning_effort low")
    assert session.run_command("/set") == 'stop [1]\nreasoning_effort "low"'
    session.run_command("/unset stop")
    (tmp_path / "tools.json").write_text(json.dumps([{"type": "function"}]))
    session.run_command(f"/tools {tmp_path / 'tools.json'}")
    assert session.fields == {"reasoning_effort": "low", "tools": [{"type": "function"}]}
    session.run_command("/tools")
    assert session.fields == {"reasoning_effort": "low"}
    session.run_command("/system be kind")
    session.run_command("/reset")
    assert session.system == "be kind"
    for line in (
        "/nonsense",
        "/set x",
        "/unset x",
        "/retry",
        "/save",
        "/load",
        "/tools /nonexistent",
        "/set stream true",
    ):
        with pytest.raises(CommandError):
            session.run_command(line)


def test_unanswered_messages_are_dropped() -> None:
    session = ChatSession("m")
    session.add_user_message("one")
    session.add_answer("", "", [StreamedCall("1", "f", "{}")])
    session.add_tool_result(StreamedCall("1", "f", "{}"), "result")
    session.drop_unanswered()
    assert session.messages == []


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_styles_but_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = FakeTerminal()
    display = ChatDisplay(output, io.StringIO())
    display.write("reasoning", "hm")
    display.write("content", "a\x1b[2Jb\x9b\tc\n")
    display.end_answer()
    assert output.getvalue() == "\x1b[2mhm\x1b[0m\na\ufffd[2Jb\ufffd\tc\n\n"


def test_what_a_broken_server_answers() -> None:
    texts = {"/text": "hello", "/v1/models": '{"data": []}'}
    with serve_script([[{"content": "x"}]], texts) as api:
        client = ApiClient(api.url + "/v1/", "key")
        with pytest.raises(ApiError, match="is not JSON: 'hello'"):
            client.get_json("/text")
        with pytest.raises(ApiError, match=r"Not Found \(status 404 of /absent\)"):
            client.get_text("/absent")
        with pytest.raises(ApiError, match="lists no model"):
            client.find_model()
        assert api.keys[-1] == "Bearer key"
    with pytest.raises(ApiError, match="is a server running there"):
        client.get_text("/text")
    assert normalize_url("https://host/base/v1/") == "https://host/base"
    for text in ("localhost:8000", "10.0.0.1:80/v1", "[::1]:8000"):
        assert (
            normalize_url(text) == f"http://{text.removesuffix('/v1')}" and split_target([text])[0] == f"http://{text}"
        )
    for model in ("demo", "org/name:Q8_0", "name", "/m/d:1/x"):
        assert split_target([model])[0] == model
