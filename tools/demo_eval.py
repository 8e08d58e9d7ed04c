"""Measure the saved demo model and write its model card.

Loads the checkpoint directory with AutoModelForCausalLM and AutoTokenizer in bf16, so the figures describe the shipped
files rather than the weights in the trainer's memory. Used only by train_demo.py.
"""

from __future__ import annotations

import ast
import itertools
import json
import lzma
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import demo_card
import demo_data
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

# Windows of WINDOW tokens start every STRIDE tokens of a file and score only tokens not scored before. So every token
# is scored once, with STRIDE to WINDOW tokens of context, except near the beginning of its file.
WINDOW = 2048
STRIDE = 1024
POSITION_EDGES = (0, 256, 512, 1024, 1536, 2048)
NUM_COMPLETION_TOKENS = 96
NUM_LONG_TOKENS = 1800
LONG_FILE = "functools.py"

PROMPTS = (
    "class Stack:\n    def __init__(self):\n",
    "def main():\n",
    "import os\nimport sys\n\n",
    'def read_lines(path):\n    """Return the lines of a file."""\n',
    "def factorial(n):\n",
    "class Point:\n    def __init__(self, x, y):\n",
    "for name in sorted(names):\n",
    "try:\n    value = int(text)\n",
    "def is_even(number):\n    return",
    'if __name__ == "__main__":\n',
)
QUESTIONS = ("Hello!", "Write a function to return the sum of two numbers.")


@dataclass(frozen=True)
class Completion:
    """A prompt, the model's text up to its last full line, and whether the two together parse as Python."""

    prompt: str
    text: str
    parses: bool


@dataclass(frozen=True)
class Evaluation:
    """All measured figures on the card."""

    num_parameters: int
    vocabulary_size: int
    num_training_files: int
    num_training_bytes: int
    num_held_out_files: int
    num_held_out_bytes: int
    bits_per_byte: float
    xz_bits_per_byte: float
    bits_per_token_by_position: dict[str, float]
    num_completion_tokens: int
    num_long_tokens: int
    completions: list[Completion]
    replies: dict[str, str]
    long_file: str
    long_continuation: str
    seconds: int

    @property
    def saved_percent(self) -> float:
        return 100 * (1 - self.bits_per_byte / self.xz_bits_per_byte)


def token_bits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the bits of ids[1:], each conditioned on all preceding ids. ids: (tokens,)."""
    logits = model(input_ids=ids[None, :-1]).logits[0].float()
    return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none") / math.log(2)


def held_out_bits(model: PreTrainedModel, documents: list[torch.Tensor]) -> tuple[float, dict[str, float]]:
    """Return the total bits of all documents, and the mean bits per token by position in a document's first window."""
    total = 0.0
    by_position: list[list[torch.Tensor]] = [[] for _ in POSITION_EDGES[1:]]
    for ids in documents:
        num_scored = 0
        for start in range(0, len(ids) - 1, STRIDE):
            bits = token_bits(model, ids[start : start + WINDOW + 1])
            total += bits[num_scored - start :].sum().item()
            num_scored = start + len(bits)
            if start == 0:
                for group, (low, high) in zip(by_position, pairs(POSITION_EDGES), strict=True):
                    group.append(bits[low:high])
            if num_scored == len(ids) - 1:
                break
    labels = [f"{low}-{high}" for low, high in pairs(POSITION_EDGES)]
    return total, {label: torch.cat(group).mean().item() for label, group in zip(labels, by_position, strict=True)}


def pairs(edges: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(edges))


def greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int], num_tokens: int) -> str:
    output = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=num_tokens)
    return tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)


def complete(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> Completion:
    text = greedy(model, tokenizer, tokenizer(prompt)["input_ids"], NUM_COMPLETION_TOKENS)
    text = text[: text.rfind("\n") + 1]
    return Completion(prompt, text, is_python(prompt + text))


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def reply(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return greedy(model, tokenizer, ids, 128)


def continue_file(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> str:
    """Continue a held-out file whose prompt fills most of the context."""
    text = greedy(model, tokenizer, ids[:NUM_LONG_TOKENS].tolist(), NUM_COMPLETION_TOKENS)
    started = tokenizer.decode(ids[NUM_LONG_TOKENS - 64 : NUM_LONG_TOKENS])
    return started[started.find("\n") + 1 :] + " <<< model begins here >>> " + text


@torch.inference_mode()
def measure(folder: Path) -> Evaluation:
    started = time.time()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    training_files, held_out_files = demo_data.read_library()
    texts = [file.content.decode("utf-8") for file in held_out_files]
    documents = [torch.from_numpy(ids) for ids in demo_data.encode_documents(tokenizer.backend_tokenizer, texts)]
    for text, ids in zip(texts, documents, strict=True):
        if tokenizer.decode(ids[1:]) != text:
            raise RuntimeError("the tokenizer does not decode a held-out file to itself")
    by_name = {file.name: ids for file, ids in zip(held_out_files, documents, strict=True)}
    held_out = b"".join(file.content for file in held_out_files)
    bits, by_position = held_out_bits(model, documents)
    return Evaluation(
        num_parameters=model.num_parameters(),
        vocabulary_size=len(tokenizer),
        num_training_files=len(training_files),
        num_training_bytes=sum(len(file.content) for file in training_files),
        num_held_out_files=len(held_out_files),
        num_held_out_bytes=len(held_out),
        bits_per_byte=bits / len(held_out),
        xz_bits_per_byte=8 * len(lzma.compress(held_out, preset=9 | lzma.PRESET_EXTREME)) / len(held_out),
        bits_per_token_by_position=by_position,
        num_completion_tokens=NUM_COMPLETION_TOKENS,
        num_long_tokens=NUM_LONG_TOKENS,
        completions=[complete(model, tokenizer, prompt) for prompt in PROMPTS],
        replies={question: reply(model, tokenizer, question) for question in QUESTIONS},
        long_file=LONG_FILE,
        long_continuation=continue_file(model, tokenizer, by_name[LONG_FILE]),
        seconds=round(time.time() - started),
    )


def evaluate(folder: Path) -> None:
    """Measure the checkpoint in `folder`, print the figures and write README.md beside it."""
    evaluation = measure(folder)
    print(json.dumps(asdict(evaluation), indent=2), flush=True)
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    (folder / "README.md").write_text(demo_card.render(evaluation, record), encoding="utf-8")
    parsed = sum(completion.parses for completion in evaluation.completions)
    print(
        f"{evaluation.bits_per_byte:.3f} bits per byte, xz {evaluation.xz_bits_per_byte:.3f}: "
        f"{evaluation.saved_percent:.1f} % fewer; {parsed} of {len(PROMPTS)} completions parse",
        flush=True,
    )
