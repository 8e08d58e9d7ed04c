"""The prompt of Qwen3-Reranker, whose next token is "yes" or "no"."""

from __future__ import annotations

from collections.abc import Sequence

from serve_llm.server.prompt.tokenizer import Side, Tokenizer

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def encode_reranker_prompts(
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    max_tokens: int,
    side: Side,
) -> list[list[int]]:
    """Return the ids of the whole prompt of each query and document. Only the part with the texts is cut on this side,
    to a total of `max_tokens`."""
    prefix = tokenizer.encode(PREFIX, add_special_tokens=False)
    suffix = tokenizer.encode(SUFFIX, add_special_tokens=False)
    texts = [
        f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        for query, document in pairs
    ]
    room = max_tokens - len(prefix) - len(suffix)
    encoded = tokenizer.encode_truncated([(text, None) for text in texts], room, side, add_special_tokens=False)
    return [[*prefix, *ids, *suffix] for ids, _ in encoded]
