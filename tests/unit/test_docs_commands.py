"""The `serve-llm` commands in code blocks of the docs name options that exist; a server accepts its own."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_llm.cli import front_end, run_batch, scale, top
from serve_llm.cli.bench import offline, serve, start
from serve_llm.cli.chat import command as chat
from serve_llm.cli.check import __main__ as check
from serve_llm.cli.convert import command as convert
from serve_llm.cli.plan import command as plan
from serve_llm.common.options.sources import make_parser, parse_args

ROOT = Path(__file__).parents[2]
# The command in from-other-engines.md shows an error.
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "from-other-engines"]
PAGES += [ROOT / "README.md", ROOT / "SECURITY.md"]
PARSERS: dict[str, tuple[Callable[[], argparse.ArgumentParser], ...]] = {
    "bench latency": (offline.create_latency_parser,),
    "bench serve": (serve.create_parser, make_parser),
    "bench start": (start.create_parser, make_parser),
    "bench throughput": (offline.create_throughput_parser,),
    "chat": (chat.create_parser, make_parser),
    "check": (check.make_parser,),
    "convert": (convert.create_parser,),
    "front-end": (front_end.create_parser,),
    "plan": (plan.create_parser,),
    "run-batch": (run_batch.create_parser,),
    "scale": (scale.create_parser,),
    "top": (top.create_parser,),
}


def find_commands() -> list[tuple[str, str]]:
    """Return the name of each command's page, and the command without variables and comments."""
    commands = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", page.read_text())
        for found in re.finditer(r"^ {4,}(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?serve-llm (.*)$", text, re.MULTILINE):
            commands.append((page.name, re.sub(r"\s+#.*", "", found[1])))
    return commands


COMMANDS = find_commands()


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 50


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_command(page: str, command: str) -> None:
    arguments = shlex.split(re.sub(r"<[^>]*>|\bMODEL\b", "demo", command).translate(str.maketrans("[]", "  ")))
    name = next((name for name in PARSERS if f"{' '.join(arguments[:2])} ".startswith(f"{name} ")), "")
    parsers = PARSERS.get(name, (make_parser,))
    known = {flag for create in parsers for flag in create()._option_string_actions}
    flags = {argument.partition("=")[0] for argument in arguments if re.match(r"--?[a-z]", argument)}
    assert flags <= known, page
    is_complete = "[" not in command and "..." not in command
    if not name and is_complete and "--config" not in flags and "--front-end-addr" not in flags:
        parse_args(arguments, {})
