"""Pairs of features that the server refuses, for docs/features.md and the test that tries them."""

from __future__ import annotations

# The pair, a field of an embeddings request, and the error. `FIELDS` has the values.
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
# The pair, an option for a model with linear attention, and the error. `OPTIONS` has the values.
REFUSED_OPTIONS: list[tuple[str, str, str]] = [
    (
        "KV offload + linear attention",
        "kv_offload_memory",
        "--kv-offload-memory: this model has linear attention, and without the states, which stay on the device, "
        "offloaded blocks are of no use; omit it",
    ),
]
OPTIONS: dict[str, object] = {
    "kv_offload_memory": "1MiB",
}
FIELDS: dict[str, object] = {
    "structured_outputs": {"regex": "a"},
    "tool_choice": "required",
    "logprobs": 1,
    "n": 2,
}
