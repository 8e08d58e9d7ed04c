"""--help and --version: every option is explained, in one group."""

import pytest

from serve_llm.common.options.fields import option_name
from serve_llm.common.options.groups import GROUP_STARTS, find_groups
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


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--version"], {})
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("serve-llm ")
