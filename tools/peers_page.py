"""Generate the tables of docs/from-*.md: options, commands, request fields and metrics of other engines."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic.fields import FieldInfo

from serve_llm.common.options.llama_cpp_flags import LLAMA_CPP_SAME
from serve_llm.common.options.ollama_flags import OLLAMA_COMMANDS, VLLM_COMMANDS
from serve_llm.common.options.peer_flag import PeerFlag
from serve_llm.common.options.peer_flags import PEER_FLAGS
from serve_llm.common.options.peer_variables import LLAMA_CPP, OLLAMA, VLLM
from serve_llm.common.options.sglang_flags import SGLANG_SAME
from serve_llm.common.options.vllm_flags import VLLM_SAME
from serve_llm.server.sampling_fields import OTHER_NAMES
from serve_llm.server.schema.peer_fields import PeerFields

SAME = {"vLLM": VLLM_SAME, "SGLang": SGLANG_SAME, "llama.cpp": LLAMA_CPP_SAME}

# Our metric, without the prefix -> those of vLLM, SGLang and llama.cpp, without theirs (`vllm:`, `sglang:`,
# `llamacpp:`).
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
    "request_inference_time_seconds": ("request_inference_time_seconds", "", ""),
    "request_prompt_tokens": ("request_prompt_tokens", "prompt_tokens_histogram", ""),
    "request_generation_tokens": ("request_generation_tokens", "generation_tokens_histogram", ""),
    "request_params_n": ("request_params_n", "", ""),
    "request_params_max_tokens": ("request_params_max_tokens", "", ""),
    "request_max_num_generation_tokens": ("request_max_num_generation_tokens", "", ""),
    "iteration_tokens_total": ("iteration_tokens_total", "", ""),
    "spec_decode_num_drafts_total": ("spec_decode_num_drafts_total", "", ""),
    "spec_decode_num_draft_tokens_total": ("spec_decode_num_draft_tokens_total", "", ""),
    "spec_decode_num_accepted_tokens_total": ("spec_decode_num_accepted_tokens_total", "spec_accept_length", ""),
    "cache_config_info": ("cache_config_info", "max_total_num_tokens", ""),
}

# The engines that support the fields of `PeerFields`. "clients" are text-generation-webui, Aphrodite, TabbyAPI,
# KoboldCpp and others.
FIELD_ORIGINS = {
    "OpenAI": "prompt_cache_options prompt_cache_retention",
    "vLLM": "spaces_between_special_tokens use_beam_search length_penalty early_stopping logits_processors "
    "kv_transfer_params ec_transfer_params vllm_xargs mm_processor_kwargs media_io_kwargs data_parallel_rank "
    "stream_interval prompt_embeds packed_top_logprobs return_prompt_text return_token_offsets weight_versions "
    "max_repetition_pattern_size min_repetition_pattern_size repetition_min_count session_id guided_json guided_regex "
    "guided_choice guided_grammar guided_whitespace_pattern guided_decoding_backend",
    "SGLang": "max_new_tokens regex ebnf stop_regex custom_params no_stop_trim",
    "llama.cpp": "n_predict repeat_penalty grammar json_schema cache_prompt id_slot timings_per_token return_progress "
    "typical_p mirostat mirostat_tau mirostat_eta xtc_probability xtc_threshold dry_multiplier dry_base "
    "dry_allowed_length dry_penalty_last_n dry_sequence_breakers",
    "Ollama": "num_ctx",
    "clients": "rep_pen sampler_seed stopping_strings ban_eos_token typical tfs top_a mirostat_mode smoothing_factor "
    "smoothing_curve guidance_scale max_tokens_second add_bos_token custom_token_bans banned_strings truncation_length "
    "api_type api_server",
}


def table(kind: str) -> str:
    """Render one table. kind: an engine, or commands, variables, fields or metrics."""
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
    rows = []
    if engine in SAME:
        same = ", ".join(f"`--{name}`" for name in SAME[engine])
        rows = [f"The same name and meaning: {same}.", ""]
    rows += [f"| {engine} | | Here |", "|---|---|---|"]
    for flag in PEER_FLAGS[engine]:
        names = ", ".join(f"`{name}`" for name in flag.names)
        rows.append(f"| {names} | {_describe_outcome(flag)} | {_escape(flag.answer.removeprefix('here it is '))} |")
    if engine == "vLLM":
        rows += [f"| `{command}` (a command) | | {answer} |" for command, answer in VLLM_COMMANDS.items()]
    return "\n".join(rows)


def _describe_outcome(flag: PeerFlag) -> str:
    if flag.is_accepted:
        return "accepted"
    if flag.at_most is not None:
        return f"accepted: up to {flag.at_most}"
    if flag.neutral:
        return "accepted: " + ", ".join(f"`{value}`" for value in flag.neutral)
    return ""


def commands_table() -> str:
    rows = ["| Ollama | Here |", "|---|---|", "| `serve` | `serve-llm MODEL`, or `serve-llm serve MODEL` |"]
    for command, answer in OLLAMA_COMMANDS.items():
        rows.append(f"| `{command}` | {answer} |")
    return "\n".join(rows + _list_variables(OLLAMA))


def _list_variables(answers: Mapping[str, str]) -> list[str]:
    return [f"| `{variable}` | {answer} |" for variable, answer in answers.items()]


def fields_table() -> str:
    origins = {name: origin for origin, names in FIELD_ORIGINS.items() for name in names.split()}
    rows = ["| Field | Of | Here |", "|---|---|---|"]
    for name, field in PeerFields.model_fields.items():
        if name in PeerFields.__annotations__:
            rows.append(f"| `{name}` | {origins[name]} | {_describe_field(name, field)} |")
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
