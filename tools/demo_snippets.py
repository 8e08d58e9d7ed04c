"""Short texts for the demo model's second stage: small, complete pieces of Python, and short chats about functions.

The first stage reads files from arbitrary offsets, so its model does not learn to begin and end a small piece of code,
which is what users of a demo ask for. Here every text is complete and followed by its end token. Used only by
train_demo.py.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

import numpy
from demo_data import ABOUT_ITSELF, END_OF_TEXT, SourceFile, docstring_summary, function_turns, render_turns
from tokenizers import Tokenizer

MAXIMUM_LINES = 14
BLOCKS = (ast.FunctionDef, ast.ClassDef, ast.Try, ast.For, ast.While, ast.If, ast.With)


def parsed_files(files: list[SourceFile]) -> Iterator[tuple[list[str], ast.Module]]:
    """Yield the lines and tree of every file that parses (some in lib2to3 have old syntax)."""
    for file in files:
        source = file.content.decode("utf-8")
        try:
            yield source.splitlines(), ast.parse(source)
        except (SyntaxError, ValueError):
            continue


def without_docstring(node: ast.stmt, lines: list[str]) -> str:
    """Return the dedented lines of a node without its docstring."""
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    kept = lines[first:last]
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False):
        docstring = node.body[0]
        kept = lines[first : docstring.lineno - 1] + lines[docstring.end_lineno or 0 : last]
        header = docstring.lineno - 1 - first
        while len(kept) > header and not kept[header].strip():
            del kept[header]
    return textwrap.dedent("\n".join(kept)) + "\n"


def is_good(text: str) -> bool:
    """Return whether the text is short, has no comments or docstrings, and parses on its own."""
    lines = text.splitlines()
    if not 2 <= len(lines) <= MAXIMUM_LINES or '"""' in text or any(line.lstrip().startswith("#") for line in lines):
        return False
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def class_beginnings(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    """Yield the class with only its first method, usually __init__."""
    methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
    header = lines[node.lineno - 1].strip()
    if methods and header.endswith(":"):
        yield f"{header}\n" + textwrap.indent(without_docstring(methods[0], lines), "    ")


def import_beginnings(tree: ast.Module, lines: list[str]) -> Iterator[str]:
    """Yield the first imports of a file, followed by one of its functions."""
    imports = [lines[node.lineno - 1] for node in tree.body if isinstance(node, ast.Import)][:4]
    functions = [without_docstring(node, lines) for node in tree.body if isinstance(node, ast.FunctionDef)]
    if len(imports) >= 2:
        for function in functions[:4]:
            yield "\n".join(imports) + "\n\n" + function


def snippets(files: list[SourceFile]) -> list[str]:
    """Return all distinct good pieces of the files, in order."""
    found: dict[str, None] = {}
    for lines, tree in parsed_files(files):
        candidates = list(import_beginnings(tree, lines))
        for node in ast.walk(tree):
            if isinstance(node, BLOCKS):
                candidates.append(without_docstring(node, lines))
            if isinstance(node, ast.ClassDef):
                candidates.extend(class_beginnings(node, lines))
        found.update(dict.fromkeys(text for text in candidates if is_good(text)))
    return list(found)


def short_chats(files: list[SourceFile]) -> list[str]:
    """Return chats that answer with a short function; every eighth one is about the model itself."""
    chats: list[str] = []
    for lines, tree in parsed_files(files):
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not (summary := docstring_summary(node)):
                continue
            code = without_docstring(node, lines)
            if is_good(code):
                chats.append(render_turns(function_turns(node, code, summary, len(chats))))
            if len(chats) % 8 == 7:
                question, answer = ABOUT_ITSELF[len(chats) // 8 % len(ABOUT_ITSELF)]
                chats.append(render_turns([("user", question), ("assistant", answer)]))
    return chats


class WholeTexts:
    """Rows that begin at the start of a text, with the end token after each text; the last text is truncated."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], seed: int) -> None:
        end = tokenizer.token_to_id(END_OF_TEXT)
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        self.texts = [numpy.array([*encoding.ids, end], dtype=numpy.int64) for encoding in encodings]
        self.generator = numpy.random.default_rng(seed)
        self._order: list[int] = []

    def next_batch(self, num_rows: int, num_tokens: int) -> numpy.ndarray:
        """Return (num_rows, num_tokens + 1) ids."""
        return numpy.stack([self._next_row(num_tokens + 1) for _ in range(num_rows)])

    def _next_row(self, length: int) -> numpy.ndarray:
        row = numpy.empty(0, dtype=numpy.int64)
        while len(row) < length:
            if not self._order:
                self._order = self.generator.permutation(len(self.texts)).tolist()
            row = numpy.concatenate([row, self.texts[self._order.pop()]])
        return row[:length]
