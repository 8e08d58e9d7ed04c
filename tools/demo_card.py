"""Render the demo model's card from measured figures. Used only by demo_eval.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import demo_data

if TYPE_CHECKING:
    from demo_eval import Completion, Evaluation

CARD = """\
# The serve-llm demo model

**This is a toy for trying the server.** It is small enough to be part of the package, so that `serve-llm` can be
started, called and tested without a download. It writes text that looks like Python; it knows nothing, and nothing
that it writes should be trusted.

| | |
|---|---|
| architecture | Qwen3 (`Qwen3ForCausalLM`), tied embeddings, bf16 |
| parameters | {parameters:,} |
| vocabulary | {vocabulary:,} (byte-level BPE, any text comes back exactly) |
| context | 2,048 tokens |
| end tokens | `{end_of_text}` (between documents), `{end_of_turn}` (after a chat turn) |
| held-out text | **{bits:.3f} bits per byte** |
| `xz -9e`, same text | {xz_bits:.3f} bits per byte |
| difference | **{saved:.1f} % fewer bits than xz** |
| completions that parse | {parsed} of {num_prompts} |

## What it can do

- It continues Python source in the style of the standard library, at best for a few sensible lines.
- In a chat it greets, answers questions about itself, and writes a function when asked for one, which is seldom the one
  that was asked for. It knows no facts and no language but Python.
- Its answers can be given any form by structured output (`response_format`, `structured_outputs`), because the server
  enforces the form. The values mean nothing.
- It has learned neither tools nor reasoning. Its chat template does not show tools, so that a request with `tools` is
  answered with 400.

## How it was made

`python tools/train_demo.py` makes every file of this directory again from the text that comes with Python:
{steps:,} and {second_steps} steps, {tokens:,} tokens, on {machine}. This took {wall} minutes by the clock beside other
work, and {processor} minutes of processor time summed over the cores; by its step times, about 40 minutes on two free
cores (torch {torch}). Seeds, file order and step counts are fixed; another Python version has another standard library
and gives a slightly different model.

- Text: the `.py` files of the standard library (Python {python}), without the folders
  {excluded_folders},
  without files and folders whose name starts with {excluded_prefixes}, and without empty files and
  files that are not UTF-8.
- Held out: a file is held out when the SHA-256 of its path relative to the library, as a number, is divisible by 20.
  {training_files} files ({training_bytes:,} bytes) for training, {held_out_files} files ({held_out_bytes:,} bytes)
  held out. The tokenizer has seen only training files.
- First stage, {steps:,} steps: whole files, in rows of 512 and at the end 2,048 tokens. {chat_share:.0f} % of the
  tokens are chats made from training files: a request to write a documented function and its source as the answer.
- Second stage, {second_steps} steps, a mixture of training files with small whole pieces of them (a function, a
  class with one method, a `try` statement ...) and short chats, so that the model can begin and end a small text.
- The {num_about} written greetings and questions about the model are the only text not from the library.
- Muon for the matrices inside the layers, AdamW for the rest.

## How it was measured

All figures are from the files in this directory, loaded with `transformers` in bf16
(`python tools/train_demo.py --evaluate`).

- Bits per byte: the bits for all tokens of the held-out files by their bytes. Each file begins with
  `{end_of_text}` (not scored). Windows of 2,048 tokens, each 1,024 after the one before; each scores only the tokens
  not scored yet, so every token is scored once. `xz -9e` compresses the same files as one stream.
- Bits per token by the place in the window (first window of each file): {by_position}.
- Completions: greedy, {completion_tokens} tokens, cut at the last full line; prompt and completion together must be
  accepted by `ast.parse`. The ten prompts were fixed before any completion was seen.
  The first stage alone (November 2026) had
  0.966 bits per byte but only 5 of 10, which is why there is a second.

## The ten completions

{completions}

## After {long_tokens:,} tokens

The first {long_tokens:,} tokens of `{long_file}` (held out) and {completion_tokens} greedy tokens.

{long_continuation}

## Two chat replies

Greedy, at most 128 tokens.

{replies}

## Chat template

`<|role|>`, a newline, the content, `<|end|>`, a newline; roles are `system`, `user`, `assistant` and `tool`.
"""


def fenced(text: str) -> str:
    """Fence the text with four backticks, since chat replies contain three-backtick fences."""
    return f"````python\n{text.rstrip()}\n````"


def render_completion(number: int, completion: Completion) -> str:
    verdict = "parses" if completion.parses else "does **not** parse"
    prompt = repr(completion.prompt).replace("`", "'")
    return f"{number}. `{prompt}`: {verdict}\n\n{fenced(completion.prompt + completion.text)}"


def render(evaluation: Evaluation, record: dict[str, Any]) -> str:
    """Render the card. record: the contents of training.json."""
    completions = evaluation.completions
    chat_tokens, text_tokens = record["chat_tokens_per_pass"], record["text_tokens_per_pass"]
    return CARD.format(
        parameters=evaluation.num_parameters,
        vocabulary=evaluation.vocabulary_size,
        end_of_text=demo_data.END_OF_TEXT,
        end_of_turn=demo_data.END_OF_TURN,
        bits=evaluation.bits_per_byte,
        xz_bits=evaluation.xz_bits_per_byte,
        saved=evaluation.saved_percent,
        parsed=sum(completion.parses for completion in completions),
        num_prompts=len(completions),
        steps=record["steps"],
        second_steps=record["second_steps"],
        tokens=record["tokens_seen"],
        wall=round(record["wall_seconds"] / 60),
        processor=round(record["processor_seconds"] / 60),
        machine="2 CPU cores",
        torch=record["torch"],
        python=record["python"],
        excluded_folders=", ".join(f"`{name}`" for name in sorted(demo_data.EXCLUDED_FOLDERS - {"__pycache__"})),
        excluded_prefixes=" or ".join(f"`{prefix}`" for prefix in demo_data.EXCLUDED_PREFIXES),
        training_files=evaluation.num_training_files,
        training_bytes=evaluation.num_training_bytes,
        held_out_files=evaluation.num_held_out_files,
        held_out_bytes=evaluation.num_held_out_bytes,
        chat_share=100 * chat_tokens / (chat_tokens + text_tokens),
        num_about=len(demo_data.ABOUT_ITSELF),
        by_position=", ".join(f"{k}: {v:.2f}" for k, v in evaluation.bits_per_token_by_position.items()),
        completion_tokens=evaluation.num_completion_tokens,
        long_tokens=evaluation.num_long_tokens,
        long_file=evaluation.long_file,
        long_continuation=fenced(evaluation.long_continuation),
        completions="\n\n".join(render_completion(number, each) for number, each in enumerate(completions, 1)),
        replies="\n\n".join(f"> {question}\n\n{fenced(text)}" for question, text in evaluation.replies.items()),
    )
