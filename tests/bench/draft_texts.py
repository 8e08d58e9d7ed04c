"""Texts for `bench.speculation`: those that the rules were tuned on, and others."""

from __future__ import annotations

import argparse
import builtins
import calendar
import configparser
import csv
import difflib
import fnmatch
import functools
import heapq
import inspect
import json
import random
import shlex
import string
import tarfile
import textwrap
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from bench.workloads import Workload

MAX_CHARACTERS = 1200  # the demo model's context is 2,048 tokens
TUNED_ON = (fnmatch.translate, heapq.merge, heapq.nsmallest, textwrap.dedent, shlex.split, textwrap.indent)
OTHER_FUNCTIONS = (
    calendar.Calendar.itermonthdays,
    configparser.RawConfigParser.getboolean,
    csv.Sniffer.has_header,
    difflib.get_close_matches,
    functools.update_wrapper,
    tarfile.TarInfo.get_info,
    zipfile.is_zipfile,
    string.Template.safe_substitute,
)
MODULES = (argparse, calendar, configparser, csv, difflib, functools, tarfile, zipfile, heapq, shlex)
COPIES = 1.6  # target ratio for texts that copy
LOSES_NOTHING = 0.98  # target ratio for other texts
FEW_IDS = 6  # number of ids that `noise` consists of
OUTPUT_TOKENS = 200  # of each request to a server
REQUESTS = 2  # to a server in a turn; three turns send all texts of most tasks once


@dataclass(frozen=True)
class Task:
    prompts: Sequence[str]
    temperature: float
    aim: float  # ratio for one stream
    few_ids: bool = False  # sample only a few ids, about equally often, so that matches mean nothing


def make_tuned() -> dict[str, Task]:
    sources = [inspect.getsource(function)[:MAX_CHARACTERS] for function in TUNED_ON]
    ordinary = [source[: len(source) // 3] for source in sources]
    return {
        "edit": Task([_ask_for_edit(source) for source in sources], 0.0, COPIES),
        "quote": Task([_ask_for_quote(source) for source in sources], 0.0, COPIES),
        "ordinary": Task(ordinary, 0.8, LOSES_NOTHING),
    }


def make_others() -> dict[str, Task]:
    """Return texts that no rule was tuned on."""
    sources = [inspect.getsource(function)[:MAX_CHARACTERS] for function in OTHER_FUNCTIONS]
    prose = [inspect.cleandoc(module.__doc__ or "")[:500] for module in MODULES if len(module.__doc__ or "") > 200]
    edits = [_ask_for_edit(source) for source in sources]
    code = [source[: len(source) // 3] for source in sources]
    # One stream of eight copies; the others have nothing to copy.
    mixed = [edits[number] if number % 8 == 0 else (code, prose)[number % 2][number // 2 % 4] for number in range(8)]
    return {
        "edit": Task(edits, 0.0, COPIES),
        "quote": Task([_ask_for_quote(source) for source in sources], 0.0, COPIES),
        "code": Task(code, 0.8, LOSES_NOTHING),
        "code, hot": Task(code, 1.2, LOSES_NOTHING),
        "prose": Task(prose, 0.8, LOSES_NOTHING),
        "JSON": Task([_make_json(seed) for seed in range(6)], 0.8, LOSES_NOTHING),
        "lists": Task([_make_list(seed) for seed in range(6)], 0.8, LOSES_NOTHING),
        "chat": Task(mixed, 0.8, LOSES_NOTHING),
        "noise": Task(code, 10.0, LOSES_NOTHING, few_ids=True),
    }


TEXTS: dict[str, Callable[[], dict[str, Task]]] = {"tuned": make_tuned, "other": make_others}


def make_workloads(texts: str, tokenizer: Path) -> dict[str, Workload]:
    """Return a workload of one stream for each task that needs no biases of single ids. texts: a key of TEXTS."""
    encoder = Tokenizer.from_file(str(tokenizer))
    return {
        name: Workload(
            name,
            streams=1,
            prompt_tokens=0,
            output_tokens=OUTPUT_TOKENS,
            requests=REQUESTS,
            texts=[encoder.encode(prompt).ids for prompt in task.prompts],
            temperature=task.temperature,
        )
        for name, task in TEXTS[texts]().items()
        if not task.few_ids
    }


def _ask_for_edit(source: str) -> str:
    edited = source.replace("self", "this").replace("key", "sort_key").replace("text", "string")
    return f"{source}\n\n# the same with other names\n{edited[: len(edited) // 2]}"


def _ask_for_quote(source: str) -> str:
    head = source[: source.index("\n") + 1]
    return f"{source}\n\n{source}\n\n{head}"


def _make_json(seed: int) -> str:
    """Return records with equal keys and different values, like those of an extraction."""
    chosen = random.Random(seed)
    records = []
    for name in chosen.sample(dir(builtins), 8):
        records.append({"name": name, "line": chosen.randrange(4000), "used": chosen.random() < 0.5, "size": seed})
    return json.dumps(records, indent=2)[:-2] + ",\n  {\n"


def _make_list(seed: int) -> str:
    """Return a Markdown list of names in random order."""
    names = random.Random(seed).sample(dir(builtins), 40)
    return "# Names\n\n" + "".join(f"- `{name}`\n" for name in names) + "- `"
