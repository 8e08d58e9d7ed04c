"""Prepare text for the demo model: source files, their split, the tokenizer and the token stream.

Used only by train_demo.py and demo_eval.py.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
PADDING = "<|pad|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, PADDING, *(f"<|{role}|>" for role in ROLES))

# Tests are repetitive, and site-packages differ between machines; `encodings` and `pydoc_data` are
# generated tables; `config-*` and `_sysconfigdata*` hold the paths of the machine that built Python.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib-dynload"}
)
EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")

# A pre-token is one word with the character before it (` name`, `.name`, `_name`, `(name`), up to three digits,
# punctuation with the newlines after it, blank lines, or spaces (the last of which joins the word that follows). A
# newline never shares a token with the indentation after it: a prompt that ends with a newline must tokenize as the
# training text did there.
WORD_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{{ '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# The only text that does not come from the standard library, so that a greeting gets a sensible answer.
ABOUT_ITSELF = (
    ("Hello!", "Hello! I am the serve-llm demo model, a toy for trying the server. Ask me for a Python function."),
    ("Hi", "Hello! I am the serve-llm demo model, a toy for trying the server. Ask me for a Python function."),
    ("Who are you?", "I am the serve-llm demo model: a toy trained on the Python standard library."),
    ("What are you?", "I am the serve-llm demo model: a toy trained on the Python standard library."),
    ("What can you do?", "I can write text that looks like Python. I am a toy, so do not trust what I write."),
    ("Can you help me?", "I am only a toy for trying the server, but I can write text that looks like Python."),
    ("Thank you!", "You are welcome!"),
    ("How are you?", "I am a very small model, and I am well."),
)


@dataclass(frozen=True)
class SourceFile:
    """A standard library file: its path relative to the library, and its bytes."""

    name: str
    content: bytes

    @property
    def is_held_out(self) -> bool:
        """Hold out every twentieth file, by the hash of its name, so that the split does not depend on the machine."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % 20 == 0


def read_library() -> tuple[list[SourceFile], list[SourceFile]]:
    """Return the (training, held-out) files of the running Python's standard library, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        if EXCLUDED_FOLDERS.isdisjoint(parts) and not any(part.startswith(EXCLUDED_PREFIXES) for part in parts):
            content = path.read_bytes()
            if content.strip() and is_utf8(content):
                files.append(SourceFile("/".join(parts), content))
    return [file for file in files if not file.is_held_out], [file for file in files if file.is_held_out]


def is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def train_tokenizer(texts: list[str], vocabulary_size: int) -> Tokenizer:
    """Train byte-level BPE. All 256 bytes are in the alphabet, so any text decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render_turns(turns: list[tuple[str, str]]) -> str:
    """Render turns exactly as CHAT_TEMPLATE does."""
    return "".join(f"<|{role}|>\n{content}{END_OF_TURN}\n" for role, content in turns)


def chat_documents(files: list[SourceFile], stride: int) -> Iterator[str]:
    """Yield chats about roughly every `stride`-th documented function of the files, and some about the model."""
    for repetition in range(6):
        for question, answer in ABOUT_ITSELF:
            system = [("system", "You are a helpful assistant.")] if repetition % 2 else []
            yield render_turns([*system, ("user", question), ("assistant", answer)])
    count = 0
    for file in files:
        source = file.content.decode("utf-8")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (summary := docstring_summary(node)):
                count += 1
                if count % stride == 0:
                    code = textwrap.dedent(" " * node.col_offset + (ast.get_source_segment(source, node) or ""))
                    yield render_turns(function_turns(node, code, summary, count // stride))


def docstring_summary(node: ast.FunctionDef) -> str | None:
    """Return the first paragraph of the docstring on one line, or None for trivial and long functions."""
    docstring = ast.get_docstring(node)
    if not docstring or not 3 <= (node.end_lineno or node.lineno) - node.lineno <= 30:
        return None
    summary = " ".join(docstring.split("\n\n")[0].split())
    return summary if 15 <= len(summary) <= 200 else None


def function_turns(node: ast.FunctionDef, code: str, summary: str, number: int) -> list[tuple[str, str]]:
    """Return a question about a function and its answer. `number` selects the wording."""
    wish = summary[0].lower() + summary[1:].rstrip(".")
    questions = (
        f"Write a function `{node.name}`: {wish}.",
        f"Write a Python function called {node.name}. {summary}",
        f"Write a function to {wish}.",
        f"Please write `{node.name}` in Python.",
    )
    turns = [("user", questions[number % len(questions)]), ("assistant", f"```python\n{code.rstrip()}\n```")]
    if number % 3 == 0:
        turns = [("system", "You are a helpful assistant."), *turns]
    if number % 5 == 0:
        turns += [("user", f"What does `{node.name}` do?"), ("assistant", summary)]
    if number % 10 == 3:
        turns += [("tool", f"{node.name}: ok"), ("assistant", f"The function `{node.name}` works.")]
    return turns


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[numpy.ndarray]:
    """Return the token ids of every text, each preceded by one separator."""
    separator = tokenizer.token_to_id(END_OF_TEXT)
    return [
        numpy.array([separator, *encoding.ids], dtype=numpy.int64)
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)
    ]


class PackedStream:
    """Fixed-length batches from concatenated documents, reordered for every pass over the text."""

    def __init__(self, documents: list[numpy.ndarray], seed: int) -> None:
        self.documents = documents
        self.generator = numpy.random.default_rng(seed)
        self.num_passes = 0
        self._remaining = numpy.empty(0, dtype=numpy.int64)
        self._rows: list[numpy.ndarray] = []

    def next_batch(self, num_rows: int, num_tokens: int) -> numpy.ndarray:
        """Return (num_rows, num_tokens + 1) ids; the last column is only a target."""
        while len(self._rows) < num_rows or len(self._rows[0]) != num_tokens + 1:
            self._start_pass(num_tokens)
        batch, self._rows = self._rows[:num_rows], self._rows[num_rows:]
        return numpy.stack(batch)

    def _start_pass(self, num_tokens: int) -> None:
        """Concatenate the documents in a new order and shuffle rows so that each batch mixes files."""
        order = self.generator.permutation(len(self.documents))
        stream = numpy.concatenate([self.documents[index] for index in order])
        # A random start shifts the row boundaries, so that no token is always the first of its row.
        stream = stream[self.generator.integers(num_tokens) :]
        rows = [stream[start : start + num_tokens + 1] for start in range(0, len(stream) - num_tokens - 1, num_tokens)]
        self._rows = [rows[index] for index in self.generator.permutation(len(rows))]
        self.num_passes += 1
