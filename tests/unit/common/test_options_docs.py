"""docs/options.md matches the options."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from serve_llm.common.options.fields import option_name
from serve_llm.common.options.schema import OPTION_FIELDS
from serve_llm.common.options.sources import parse_args
from support.scripts import load_script

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def make_docs() -> ModuleType:
    return load_script(ROOT / "tools" / "make_docs.py")


def test_page_is_current(make_docs: ModuleType) -> None:
    page = make_docs.OPTIONS_PAGE.read_text(encoding="utf-8")
    assert make_docs.update_page(page, make_docs.PAGES[make_docs.OPTIONS_PAGE]) == page, "run `make docs`"


def test_table_names_every_option(make_docs: ModuleType) -> None:
    rows = make_docs.options_table().splitlines()[2:]
    assert len(rows) == len(OPTION_FIELDS)
    for row, option in zip(rows, OPTION_FIELDS, strict=True):
        assert option_name(option) in row.lower() and str(option.metadata["help"]).split("|")[0] in row
        assert row.replace("\\|", "").count("|") == 5


def test_check_fails_on_an_old_page(make_docs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "options.md"
    tables = "\n".join("\noutdated\n".join(markers) for markers in (make_docs.OPTIONS, make_docs.LIMITS))
    page.write_text(f"above\n{tables}\nbelow\n")
    monkeypatch.setattr(make_docs, "PAGES", {page: make_docs.PAGES[make_docs.OPTIONS_PAGE]})
    monkeypatch.setattr("sys.argv", ["make_docs.py", "--check"])
    assert make_docs.main() == 1 and "outdated" in page.read_text()
    monkeypatch.setattr("sys.argv", ["make_docs.py"])
    assert make_docs.main() == 0
    text = page.read_text()
    assert (
        text.startswith("above\n")
        and text.endswith("\nbelow\n")
        and "--max-model-len" in text
        and "outdated" not in text
    )
    monkeypatch.setattr("sys.argv", ["make_docs.py", "--check"])
    assert make_docs.main() == 0


def test_the_file_of_a_typical_server_is_read(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n# server\.yaml.*?\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "server.yaml"
    file.write_text(text)
    options = parse_args(["--config", str(file)], {"SERVE_LLM_API_KEY": "key-of-a-team,key-of-another"})
    assert (options.host, options.max_model_len, options.log_format) == ("0.0.0.0", 32_000, "json")
    assert options.served_model_name == ("qwen3",) and len(options.api_key) == 2
