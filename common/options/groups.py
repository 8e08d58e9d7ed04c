"""The groups of options in --help: consecutive fields of `Options`, named by the first one."""

from __future__ import annotations

from serve_llm.common.options.schema import OPTION_FIELDS

# First option of a group -> title.
GROUP_STARTS = {
    "revision": "model",
    "dtype": "data types",
    "max_model_len": "steps and memory",
    "enforce_eager": "computation",
    "kv_cache_memory": "KV cache",
    "jump_forward": "tokens",
    "device": "devices and parallelism",
    "nnodes": "several hosts",
    "max_restarts": "restarts",
    "log_level": "logs",
    "host": "HTTP",
    "served_model_name": "API",
    "max_queue": "admission",
    "responses_store": "storage",
    "unknown_fields": "limits and operation",
}
OTHER_GROUP = "this command"  # options that the server does not have


def find_groups() -> dict[str, str]:
    """Map the field name of each option except the model to the title of its group."""
    found: dict[str, str] = {}
    title = ""
    for option in OPTION_FIELDS:
        title = GROUP_STARTS.get(option.name, title)
        if title:
            found[option.name] = title
    return found
