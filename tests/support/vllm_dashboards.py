"""What vLLM's own Grafana dashboards query from Prometheus: those in examples/observability/dashboards/grafana in
November 2026 (Overview, Instances, KV Cache, Speculative Decoding, Service Status).

Names have the suffix of a counter, but not those of a histogram's samples.
"""

from __future__ import annotations

OF_ENGINE = {"model_name", "engine"}
# Metrics and the labels by which the dashboards select, group or describe. `job` and `instance` are Prometheus' own.
SERVED: dict[str, set[str]] = {
    "vllm:cache_config_info": OF_ENGINE
    | {
        "num_gpu_blocks",
        "block_size",
        "cache_dtype",
        "gpu_memory_utilization",
        "enable_prefix_caching",
        "prefix_caching_hash_algo",
        "num_cpu_blocks",
        "kv_offloading_backend",
        "kv_offloading_size",
    },
    "vllm:e2e_request_latency_seconds": OF_ENGINE,
    "vllm:engine_sleep_state": OF_ENGINE | {"sleep_state"},
    "vllm:generation_tokens_total": OF_ENGINE,
    "vllm:inter_token_latency_seconds": OF_ENGINE,
    "vllm:iteration_tokens_total": OF_ENGINE,
    "vllm:kv_cache_usage_perc": OF_ENGINE,
    "vllm:kv_offload_load_bytes_total": OF_ENGINE,
    "vllm:kv_offload_store_bytes_total": OF_ENGINE,
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    "vllm:num_preemptions_total": OF_ENGINE,
    "vllm:num_requests_running": OF_ENGINE,
    "vllm:num_requests_waiting": OF_ENGINE,
    "vllm:num_requests_waiting_by_reason": OF_ENGINE | {"reason"},
    "vllm:prefix_cache_hits_total": OF_ENGINE,
    "vllm:prefix_cache_queries_total": OF_ENGINE,
    "vllm:prompt_tokens_by_source_total": OF_ENGINE | {"source"},
    "vllm:prompt_tokens_cached_total": OF_ENGINE,
    "vllm:prompt_tokens_total": OF_ENGINE,
    "vllm:request_decode_time_seconds": OF_ENGINE,
    "vllm:request_generation_tokens": OF_ENGINE,
    "vllm:request_prefill_kv_computed_tokens": OF_ENGINE,
    "vllm:request_prefill_time_seconds": OF_ENGINE,
    "vllm:request_prompt_tokens": OF_ENGINE,
    "vllm:request_queue_time_seconds": OF_ENGINE,
    "vllm:request_success_total": OF_ENGINE | {"finished_reason"},
    "vllm:request_time_per_output_token_seconds": OF_ENGINE,
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": OF_ENGINE | {"position"},
    "vllm:spec_decode_num_accepted_tokens_total": OF_ENGINE,
    "vllm:spec_decode_num_draft_tokens_total": OF_ENGINE,
    "vllm:spec_decode_num_drafts_total": OF_ENGINE,
    "vllm:time_to_first_token_seconds": OF_ENGINE,
    "http_request_duration_seconds": {"handler"},
    "http_requests_total": {"handler", "status"},
    "process_cpu_seconds_total": set(),
    "process_max_fds": set(),
    "process_open_fds": set(),
    "process_resident_memory_bytes": set(),
    "process_start_time_seconds": set(),
}
# Label values by which the dashboards select.
VALUES = {
    ("vllm:num_requests_waiting_by_reason", "reason"): {"capacity", "deferred"},
    ("vllm:prompt_tokens_by_source_total", "source"): {"local_compute", "local_cache_hit", "external_kv_transfer"},
    ("vllm:engine_sleep_state", "sleep_state"): {"awake", "discard_all"},
    ("vllm:request_success_total", "finished_reason"): {"stop", "length", "repetition", "abort", "error"},
    # Targets offered by their variables: 100 ms to 10 s, and 25 ms to 500 ms.
    ("vllm:time_to_first_token_seconds", "le"): {"0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"},
    ("vllm:request_time_per_output_token_seconds", "le"): {
        *("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"),
    },
}
# Metrics that are not served. docs/metrics.md says why.
NOT_SERVED = {
    "vllm:estimated_flops_per_gpu_total",
    "vllm:estimated_read_bytes_per_gpu_total",
    "vllm:estimated_write_bytes_per_gpu_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:kv_block_idle_before_evict_seconds",
    "vllm:kv_block_lifetime_seconds",
    "vllm:kv_block_reuse_gap_seconds",
    "vllm:kv_offload_allocation_failure_total",
    "vllm:kv_offload_cpu_cache_read_usage_perc",
    "vllm:kv_offload_cpu_cache_usage_perc",
    "vllm:kv_offload_cpu_cache_write_usage_perc",
    "vllm:kv_offload_load_size",
    "vllm:kv_offload_load_time_total",
    "vllm:kv_offload_lookup_async_delay_seconds",
    "vllm:kv_offload_lookup_sync_delay_seconds",
    "vllm:kv_offload_store_size",
    "vllm:kv_offload_store_time_total",
    "vllm:kv_offload_stores_skipped_total",
    "vllm:mm_cache_hits_total",
    "vllm:mm_cache_queries_total",
    "vllm:nixl_bytes_transferred",
    "vllm:nixl_num_descriptors",
    "vllm:nixl_num_failed_notifications_total",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_notifications_after_expiry_total",
    "vllm:nixl_post_time_seconds",
    "vllm:nixl_xfer_time_seconds",
    "vllm:num_requests_kv_fetch_by_stage",
    "vllm:prompt_tokens_cached_by_source_total",
    "vllm:rl_weight_update_operation_duration_seconds",
    "vllm:simple_kv_offload_load_blocks_total",
    "vllm:simple_kv_offload_pending_store_blocks",
    "vllm:simple_kv_offload_save_outcomes_total",
    "vllm:simple_kv_offload_used_blocks",
    "vllm:sleep_mode_operation_duration_seconds",
}
