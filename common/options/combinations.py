"""Refuse options that cannot be combined, before anything is started."""

from __future__ import annotations

import dataclasses

from serve_llm.common.errors import OptionError
from serve_llm.common.options.schema import Options
from serve_llm.common.options.speculative import find_mtp_model

DEFAULTS = {field.name: field.default for field in dataclasses.fields(Options)}


def check_combinations(options: Options) -> None:
    """Raise an OptionError that names the options."""
    _check_nodes(options)
    _check_scaling(options)
    _check_experts(options)
    _check_model_impl(options)
    _check_lora(options)
    _check_offload(options)
    _check_speculation(options)
    if (options.ssl_keyfile is None) != (options.ssl_certfile is None):
        raise OptionError("--ssl-keyfile and --ssl-certfile must be given together")
    if options.max_log_len is not None and not options.enable_log_requests:
        raise OptionError("--max-log-len needs --enable-log-requests")
    if options.has_front_ends and (options.otlp_traces_endpoint or "").startswith("file:"):
        raise OptionError(
            "--otlp-traces-endpoint: a file takes the traces of one process, but --front-ends and --front-end-addr "
            "mean more"
        )
    if options.front_end_addr is not None and not options.cluster_secret:
        raise OptionError("--front-end-addr needs --cluster-secret, because hosts that join receive the API keys")


def _check_scaling(options: Options) -> None:
    """Refuse contradictory bounds on the number of engines, and engines that cannot be added or removed."""
    if not options.is_scalable:
        return
    fewest = options.min_engines
    size = options.data_parallel_size
    most = options.max_engines
    if not fewest <= size <= most:
        raise OptionError(
            f"--data-parallel-size: {size} is not between --data-parallel-min {fewest} and --data-parallel-max {most}"
        )
    refused = {
        "--enable-expert-parallel, whose engines share experts": options.enable_expert_parallel,
        "--nnodes, whose hosts learn their engines once": options.nnodes > 1,
    }
    if wrong := [name for name, is_refused in refused.items() if is_refused]:
        raise OptionError(f"--data-parallel-min and --data-parallel-max cannot be combined with {wrong[0]}")


def _check_experts(options: Options) -> None:
    """Refuse to rebalance experts if there is no other engine to move them to."""
    if options.eplb_config is not None and not options.enable_eplb:
        raise OptionError("--eplb-config needs --enable-eplb")
    if options.enable_eplb and not options.experts_span_engines:
        raise OptionError(
            "--enable-eplb moves experts between engines: give --enable-expert-parallel and a --data-parallel-size "
            "above 1, or omit it"
        )


def _check_model_impl(options: Options) -> None:
    """Refuse options that transformers' own code does not support."""
    if options.model_impl == "auto":
        return
    refused = {
        "--tensor-parallel-size": options.tensor_parallel_size > 1,
        "--pipeline-parallel-size": options.pipeline_parallel_size > 1,
        "--distributed-executor-backend": options.distributed_executor_backend not in (None, "inprocess"),
        "--enable-expert-parallel": options.enable_expert_parallel,
        "--nnodes": options.nnodes > 1,
        "--quantization": options.quantization != "auto",
        "--allow-unknown-config": bool(options.allow_unknown_config),
    }
    wrong = [name for name, is_refused in refused.items() if is_refused]
    if wrong:
        raise OptionError(
            "--model-impl: transformers' code runs as one rank in the engine process and cannot be combined with "
            f"{', '.join(wrong)}"
        )


def _check_lora(options: Options) -> None:
    """Refuse options that cannot be combined with adapters."""
    if not options.enable_lora:
        if options.lora_modules:
            raise OptionError("--lora-modules needs --enable-lora")
        for name in ("max_loras", "max_cpu_loras", "max_lora_rank"):
            if getattr(options, name) != DEFAULTS[name]:
                raise OptionError(f"--{name.replace('_', '-')} needs --enable-lora")
        return
    if options.max_cpu_loras is not None and options.max_cpu_loras < options.max_loras:
        raise OptionError(f"--max-cpu-loras: {options.max_cpu_loras} is less than --max-loras {options.max_loras}")
    refused = {
        "--model-impl transformers, whose layers take no adapters": options.model_impl != "auto",
        "--runner pooling: only models that generate text take adapters": options.runner == "pooling",
        "--load-format dummy, whose weights no adapter was trained for": options.load_format == "dummy",
    }
    if wrong := [name for name, is_refused in refused.items() if is_refused]:
        raise OptionError(f"--enable-lora cannot be combined with {wrong[0]}")
    if shared := {module.partition("=")[0] for module in options.lora_modules} & set(options.served_model_name):
        raise OptionError(f"--lora-modules: {min(shared)} is also a --served-model-name")


def _check_speculation(options: Options) -> None:
    """Refuse an MTP layer from another checkpoint, and a draft model on some of the ranks."""
    if options.speculative_config is None:
        return
    size = 1 if options.speculation is None else options.speculation.draft_tensor_parallel_size
    if size not in (1, options.tensor_parallel_size):
        raise OptionError(
            f"--speculative-config: draft_tensor_parallel_size must be 1 or --tensor-parallel-size, which is "
            f"{options.tensor_parallel_size}, not {size}"
        )
    model = find_mtp_model(options.speculative_config)
    if model not in (None, options.model):
        raise OptionError(
            f"--speculative-config: the MTP layer is in the checkpoint of {options.model}, not in {model}; omit 'model'"
        )


def _check_offload(options: Options) -> None:
    """Refuse to offload blocks that are never looked up or that some ranks cannot access."""
    if options.kv_offload_dir is not None:
        if options.kv_offload_memory is None:
            raise OptionError("--kv-offload-dir needs --kv-offload-memory, through which blocks reach the disk")
        if options.nnodes > 1 or options.distributed_executor_backend == "ray":
            raise OptionError("--kv-offload-dir needs all ranks on one host; omit it with --nnodes and Ray")
    elif options.kv_offload_dir_size is not None:
        raise OptionError("--kv-offload-dir-size needs --kv-offload-dir")
    if options.kv_events is not None and options.enable_prefix_caching is False:
        raise OptionError("--kv-events-config needs prefix caching; omit --no-prefix-caching")
    if options.kv_offload_memory is not None and options.enable_prefix_caching is False:
        raise OptionError("--kv-offload-memory needs prefix caching; omit --no-prefix-caching")


def _check_nodes(options: Options) -> None:
    """Refuse contradictory options for several hosts."""
    if options.node_rank >= options.nnodes:
        raise OptionError(
            f"--node-rank: {options.node_rank} is not from 0 to {options.nnodes - 1} (--nnodes {options.nnodes})"
        )
    if options.nnodes == 1:
        if options.data_parallel_split is not None:
            raise OptionError("--data-parallel-split divides engines among several hosts, but --nnodes is 1")
        return
    if options.master_addr is None:
        raise OptionError(f"--nnodes: {options.nnodes} hosts need --master-addr HOST:PORT, the same on all of them")
    if options.node_rank == 0:
        _check_shares(options)


def _check_shares(options: Options) -> None:
    """Refuse hosts that would have no ranks."""
    engines = options.data_parallel_size
    nodes = options.nnodes
    split = options.data_parallel_split
    if split is not None:
        if len(split) != nodes:
            raise OptionError(f"--data-parallel-split: {len(split)} numbers, but --nnodes is {nodes}")
        if sum(split) != engines:
            raise OptionError(
                f"--data-parallel-split: {sum(split)} engines in total, but --data-parallel-size is {engines}"
            )
        if 0 in split[1:]:
            raise OptionError(
                f"--data-parallel-split: node {split.index(0, 1)} would have no engine; only node 0, which serves "
                "HTTP, may have none"
            )
        return
    num_ranks = options.tensor_parallel_size * options.pipeline_parallel_size
    if num_ranks < -(-nodes // engines):
        of_engines = f" of each of {engines} engines" if engines > 1 else ""
        raise OptionError(
            f"--nnodes: {nodes} hosts for {num_ranks} rank{'s' if num_ranks > 1 else ''}{of_engines} "
            "(--tensor-parallel-size times --pipeline-parallel-size), so some would have none"
        )
