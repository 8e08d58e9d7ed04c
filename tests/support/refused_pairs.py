"""Pairs of features that the server refuses, for docs/features.md and the test that tries them."""

from __future__ import annotations

# The pair, a field of the body of an embeddings request, and the answer. `FIELDS` has the values.
REFUSALS: list[tuple[str, str, str]] = [
    (
        "grammar + embeddings",
        "structured_outputs",
        "structured_outputs is not supported; it concerns generated text, and this route generates none",
    ),
    (
        "tools + embeddings",
        "tool_choice",
        "tool_choice is not supported; it concerns generated text, and this route generates none",
    ),
    (
        "logprobs + embeddings",
        "logprobs",
        "logprobs is not supported; it concerns generated text, and this route generates none",
    ),
    ("n + embeddings", "n", "n is not supported; it concerns generated text, and this route generates none"),
]
FIELDS: dict[str, object] = {
    "structured_outputs": {"regex": "a"},
    "tool_choice": "required",
    "logprobs": 1,
    "n": 2,
}
