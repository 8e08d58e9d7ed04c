"""--help and --version: every option is explained in exactly one group."""

import pytest

from serve_llm.cli import main
from serve_llm.cli.bench import serve
from serve_llm.common.errors import CapacityError, EngineError, ModelError, OptionError, ServeError
from serve_llm.common.options.fields import option_name
from serve_llm.common.options.groups import GROUP_STARTS, find_groups
from serve_llm.common.options.help_text import DESCRIPTION, NOTES
from serve_llm.common.options.schema import OPTION_FIELDS
from serve_llm.common.options.sources import parse_args


def test_help_names_every_option_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"], {})
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in OPTION_FIELDS:
        assert ("model" if option.name == "model" else f"--{option_name(option)}") in text
        assert str(option.metadata["help"]).split("(")[0].split("--")[0].strip() in text


def test_help_has_every_option_in_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    titles = find_groups()
    assert set(titles) == {option.name for option in OPTION_FIELDS} - {"model"}
    assert set(GROUP_STARTS) <= set(titles)
    with pytest.raises(SystemExit):
        parse_args(["--help"], {})
    text = capsys.readouterr().out
    assert text.startswith("usage: serve-llm MODEL [options]\n")
    places = [text.index(f"\n{title}:\n") for title in GROUP_STARTS.values()]
    assert places == sorted(places)
    assert places[0] < text.index("  --revision") < places[1]


def test_help_about_a_word_shows_the_options_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    def read(*argv: str) -> str:
        with pytest.raises(SystemExit) as caught:
            parse_args(argv, {})
        assert caught.value.code == 0
        return capsys.readouterr().out

    assert read("demo", "--help=max-num_seqs").startswith("--max-num-seqs MAX_NUM_SEQS")
    assert {"--log-level", "--max-log-len"} <= set(read("--help=Logs").split())
    assert read("--help=all") == read("--help")
    with pytest.raises(OptionError, match="no option or group has 'zzz' in its name; see serve-llm --help"):
        parse_args(["--help=zzz"], {})


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--version"], {})
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("serve-llm ")


def test_help_lists_the_commands_exit_codes_and_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--help"], {})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, [*DESCRIPTION.split("\n\n")[1].splitlines(), *NOTES.splitlines()])) <= 80
    commands = lines[lines.index("commands, each with --help:") + 1 :]
    named = {line.split()[0] for line in commands[: commands.index("")]}
    assert named == set(main.COMMANDS) - {"serve"} | {"MODEL"}
    codes = lines[lines.index("EXIT STATUS:") + 1 : lines.index("EXAMPLES:") - 1]
    classes = (ServeError, OptionError, ModelError, CapacityError, EngineError)
    assert [int(line.split()[0]) for line in codes] == [0, *(error.exit_code for error in classes)]
    examples = [line.split() for line in lines[lines.index("EXAMPLES:") + 1 :]]
    assert len(examples) > 3 and all(example[0] == "serve-llm" for example in examples)
    for example in examples:
        if example[1] not in main.COMMANDS and "--config" not in example:
            assert parse_args(example[1:], {}).model == example[1]


def test_help_of_a_benchmark_shows_defaults_that_say_something() -> None:
    text = " ".join(serve.create_parser().format_help().split())
    assert "(default: 1000)" in text and "(default: 0)" in text
    assert not [word for word in ("None", "False", "[]") if f"(default: {word})" in text]
