"""Choose the dialect of the served model: the user's choice, else the checkpoint's, else that of its chat template."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from serve_llm.common.errors import OptionError
from serve_llm.common.hub import read_json
from serve_llm.server.dialects.dialect import Dialect, DialectError, read_dialect
from serve_llm.server.dialects.fingerprint import find_dialect, fit_dialect
from serve_llm.server.dialects.response_template import read_response_template
from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.prompt.template import ChatTemplate

NO_DIALECT = "none"


class ChosenDialect(NamedTuple):
    dialect: Dialect | None
    source: str  # for the log


def choose_dialect(
    chosen: str | None, directory: Path, template: ChatTemplate | None, added_tokens: Collection[str]
) -> ChosenDialect:
    """chosen: the option --dialect. directory: of the tokenizer. Raises OptionError, ModelError."""
    if chosen is not None:
        return ChosenDialect(_read_option(chosen), "--dialect")
    path = directory / "tokenizer_config.json"
    declared = read_json(path).get("response_template") if path.is_file() else None
    ignored = ""
    if declared is not None:
        try:
            dialect = read_response_template(declared)
            fitted = dialect if template is None else fit_dialect(dialect, template)
            return ChosenDialect(fitted, "the checkpoint's response_template")
        except DialectError as error:
            ignored = f", because of {error}"
    if template is None:
        return ChosenDialect(None, f"no chat template{ignored}")
    found = find_dialect(template, added_tokens)
    return ChosenDialect(found, f"{'found by' if found else 'unknown to'} the chat template{ignored}")


def _read_option(chosen: str) -> Dialect | None:
    if chosen == NO_DIALECT:
        return None
    if chosen in BUILT_IN:
        return BUILT_IN[chosen]
    path = Path(chosen).expanduser()
    try:
        return read_dialect(path.read_bytes())
    except FileNotFoundError:
        names = ", ".join(sorted(BUILT_IN))
        raise OptionError(f"--dialect {chosen}: neither a file nor one of {NO_DIALECT}, {names}") from None
    except OSError as error:
        raise OptionError(f"--dialect {chosen}: {error.strerror}") from None
    except DialectError as error:
        raise OptionError(f"--dialect {chosen}: {error}") from None
