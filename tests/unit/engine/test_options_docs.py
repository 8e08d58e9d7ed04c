"""docs/options.md is what the options say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from serve_llm.engine.fields import option_name
from serve_llm.engine.options import fields

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def make_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "tools" / "make_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_current(make_docs: ModuleType) -> None:
    page = make_docs.OPTIONS_PAGE.read_text(encoding="utf-8")
    assert make_docs.updated(page, make_docs.PAGES[make_docs.OPTIONS_PAGE]) == page, "run `make docs`"


def test_table_names_every_option(make_docs: ModuleType) -> None:
    rows = make_docs.table().splitlines()[2:]
    assert len(rows) == len(fields())
    for row, option in zip(rows, fields(), strict=True):
        assert option_name(option) in row.lower() and str(option.metadata["help"]).split("|")[0] in row
        assert row.replace("\\|", "").count("|") == 5


def test_check_fails_on_an_old_page(make_docs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "options.md"
    page.write_text(
        f"above\n{make_docs.BEGIN}\noutdated\n{make_docs.END}\n" + "\noutdated\n".join(make_docs.LIMITS) + "\nbelow\n"
    )
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
