"""The tables of docs/from-*.md: options, commands, request fields and metrics of other engines."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic.fields import FieldInfo

from serve_llm.common.options.llama_cpp_flags import LLAMA_CPP_SAME
from serve_llm.common.options.peer_flag import PeerFlag
from serve_llm.common.options.peer_flags import PEER_COMMANDS, PEER_FLAGS
from serve_llm.common.options.peer_variables import LLAMA_CPP, OLLAMA, VLLM
from serve_llm.common.options.sglang_flags import SGLANG_SAME
from serve_llm.common.options.vllm_flags import VLLM_SAME
from serve_llm.server.schema.peer_fields import OTHER_NAMES, PeerFields

SAME = {"vLLM": VLLM_SAME, "SGLang": SGLANG_SAME, "llama.cpp": LLAMA_CPP_SAME}

# Ours, without the prefix -> vLLM's, SGLang's and llama.cpp's, without theirs (`vllm:`, `sglang:`, `llamacpp:`).
METRICS = {
    "num_requests_running": ("num_requests_running", "num_running_reqs", "requests_processing"),
    "num_requests_waiting": ("num_requests_waiting", "num_queue_reqs", "requests_deferred"),
    "num_requests_waiting_by_reason": ("num_requests_waiting_by_reason", "", ""),
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "token_usage", ""),
    "prompt_tokens_total": ("prompt_tokens_total", "prompt_tokens_total", "prompt_tokens_total"),
    "generation_tokens_total": ("generation_tokens_total", "generation_tokens_total", "tokens_predicted_total"),
    "prefix_cache_hits_total": ("prefix_cache_hits_total", "cached_tokens_total", ""),
    "prefix_cache_queries_total": ("prefix_cache_queries_total", "", ""),
    "num_preemptions_total": ("num_preemptions_total", "", ""),
    "request_num_preemptions": ("request_num_preemptions", "", ""),
    "request_success_total": ("request_success_total", "num_requests_total", ""),
    "time_to_first_token_seconds": ("time_to_first_token_seconds", "time_to_first_token_seconds", ""),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "inter_token_latency_seconds", ""),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds", "e2e_request_latency_seconds", ""),
    "request_queue_time_seconds": ("request_queue_time_seconds", "queue_time_seconds", ""),
    "request_prefill_time_seconds": ("request_prefill_time_seconds", "", "prompt_seconds_total"),
    "request_decode_time_seconds": ("request_decode_time_seconds", "", "tokens_predicted_seconds_total"),
    "cache_config_info": ("cache_config_info", "max_total_num_tokens", ""),
}


def table(kind: str) -> str:
    """kind: an engine, or commands, variables, fields or metrics."""
    if kind == "commands":
        return commands_table()
    if kind == "variables":
        return "\n".join(["| Variable | Here |", "|---|---|", *_list_variables(VLLM | LLAMA_CPP)])
    if kind == "fields":
        return fields_table()
    if kind == "metrics":
        return metrics_table()
    return flags_table(kind)


def flags_table(engine: str) -> str:
    same = ", ".join(f"`--{name}`" for name in SAME[engine])
    rows = [f"The same name and meaning: {same}.", "", f"| {engine} | | Here |", "|---|---|---|"]
    for flag in PEER_FLAGS[engine]:
        names = ", ".join(f"`{name}`" for name in flag.names)
        rows.append(f"| {names} | {_describe_outcome(flag)} | {_escape(flag.answer.removeprefix('here it is '))} |")
    return "\n".join(rows)


def _describe_outcome(flag: PeerFlag) -> str:
    if flag.is_accepted:
        return "accepted"
    if flag.neutral:
        return "accepted: " + ", ".join(f"`{value}`" for value in flag.neutral)
    return ""


def commands_table() -> str:
    rows = ["| Ollama | Here |", "|---|---|", "| `serve` | `serve-llm MODEL`, or `serve-llm serve MODEL` |"]
    for command, answer in PEER_COMMANDS.items():
        rows.append(f"| `{command}` | {answer} |")
    return "\n".join(rows + _list_variables(OLLAMA))


def _list_variables(answers: Mapping[str, str]) -> list[str]:
    return [f"| `{variable}` | {answer} |" for variable, answer in answers.items()]


def fields_table() -> str:
    rows = ["| Field | Here |", "|---|---|"]
    for name, field in PeerFields.model_fields.items():
        if name in PeerFields.__annotations__:
            rows.append(f"| `{name}` | {_describe_field(name, field)} |")
    return "\n".join(rows)


def _describe_field(name: str, field: FieldInfo) -> str:
    if name in OTHER_NAMES:
        return f"`{OTHER_NAMES[name]}`"
    extra = field.json_schema_extra
    if not isinstance(extra, dict):
        return _escape(field.description or "accepted, no effect")
    values = [value for value in extra["enum"] if value is not None]  # type: ignore[union-attr]
    accepted = "accepted: " + ", ".join(f"`{value!r}`" for value in values) if values else "refused"
    hint = (field.description or "").removesuffix(".").partition("; ")[2]
    return _escape(accepted + (f"; {hint}" if hint else ""))


def metrics_table() -> str:
    rows = [
        "| Here (`serve_llm_`) | vLLM (`vllm:`) | SGLang (`sglang:`) | llama.cpp (`llamacpp:`) |",
        "|---|---|---|---|",
    ]
    for ours, theirs in METRICS.items():
        cells = " | ".join(f"`{name}`" if name else "" for name in theirs)
        rows.append(f"| `{ours}` | {cells} |")
    return "\n".join(rows)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
