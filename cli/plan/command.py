"""`serve-llm plan <model>`: predict from config.json whether a model fits and how to spread it, as a table or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Mapping, Sequence

from serve_llm.cli.plan.hardware import HardwareOptions
from serve_llm.cli.plan.planner import LayoutPlan, MemoryPlan, RankPlan, build_plan, make_plan
from serve_llm.cli.plan.remedies import Remedy, describe_shortage, find_remedies, format_sizes
from serve_llm.common.errors import CapacityError
from serve_llm.common.hub import read_config, resolve_config
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.options.schema import OPTION_FIELDS, Options
from serve_llm.common.options.sources import build_from_flags, build_options, collect_given, make_parser
from serve_llm.common.options.sources import read_command_line as read_flags
from serve_llm.engine.worker.kv_cache import count_cache_tokens, describe_capacity, describe_states, format_bytes

SERVER_OPTIONS = (
    "model",
    "revision",
    "download_dir",
    "device",
    "dtype",
    "quantization",
    "model_impl",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "tensor_parallel_split",
    "pipeline_parallel_layers",
    "enable_expert_parallel",
    "enable_eplb",
    "eplb_config",
    "data_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "enforce_eager",
    "batch_invariant",
    "kv_cache_memory",
    "kv_cache_dtype",
    "kv_offload_memory",
    "block_size",
    "allow_unknown_config",
    "speculative_config",
    "enable_lora",
    "max_loras",
    "max_cpu_loras",
    "max_lora_rank",
)
HARDWARE_FIELDS = dataclasses.fields(HardwareOptions)
PLAN_FIELDS = [option for option in OPTION_FIELDS if option.name in SERVER_OPTIONS] + list(HARDWARE_FIELDS)
LAYOUT_OPTIONS = {"tensor_parallel_size", "pipeline_parallel_size"}
DESCRIPTION = (
    "Predict from its config.json whether a model fits, what every rank would hold and how to spread the model. "
    "Options that the server also has mean what they mean to the server."
)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the plan. Return 0 if the model fits. Raises ServeError; CapacityError, after the plan, if it does not."""
    options, hardware, states_layout, as_json = read_command_line(argv, environ)
    directory = resolve_config(options.model, options.revision, options.download_dir)
    raw = read_config(directory)
    plan = make_plan(options, hardware, raw, directory, states_layout)

    def plan_again(options: EngineOptions, hardware: HardwareOptions, states_layout: bool) -> MemoryPlan:
        return build_plan(options, hardware, raw, directory, states_layout)

    remedies = find_remedies(plan, options, hardware, states_layout, plan_again)
    text = json.dumps(format_json(plan, options, remedies), indent=2) if as_json else format_text(plan, options)
    sys.stdout.write(text + "\n")
    if not plan.chosen.fits:
        raise CapacityError(describe_shortage(plan, remedies))
    return 0


def read_command_line(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Options, HardwareOptions, bool, bool]:
    """The server's options, the hardware options, whether the layout is given, and whether --json was given.

    Raises OptionError.
    """
    given = read_flags(create_parser(), argv)
    as_json = bool(given.pop("json", False))
    names = {option.name for option in HARDWARE_FIELDS}
    hardware = {name: given.pop(name) for name in names & given.keys()}
    values = collect_given(given, environ)
    states_layout = not LAYOUT_OPTIONS.isdisjoint(values)
    return build_options(values), build_from_flags(HardwareOptions, hardware), states_layout, as_json


def create_parser() -> argparse.ArgumentParser:
    parser = make_parser("serve-llm plan", DESCRIPTION, PLAN_FIELDS)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    return parser


def format_text(plan: MemoryPlan, options: Options) -> str:
    """The plan for people."""
    config = plan.config
    spec = plan.spec
    chosen = plan.chosen
    lines = [
        f"{options.model}: {spec.architecture}, {len(spec.layers)} layers, {config.types}, "
        f"up to {config.max_model_len:,} tokens per request, on {_describe_hardware(plan)}",
        "",
    ]
    lines += _format_table(chosen)
    lines.append("")
    if config.max_loras:
        num_held = config.max_cpu_loras if config.device == "cpu" else config.max_loras
        ranks = f"{num_held} adapters of rank {config.max_lora_rank}"
        lines.append(f"Weights include up to {format_bytes(max(rank.adapters for rank in chosen.ranks))} for {ranks}")
    if chosen.ranks[0].draft_model:
        lines.append(f"Weights of rank 0 include {format_bytes(chosen.ranks[0].draft_model)} for the draft model")
    if config.data_parallel_size > 1:
        lines.append(f"Each of the {config.data_parallel_size} data-parallel engines:")
    if chosen.fits:
        lines += describe_states(chosen.cache)
        lines += describe_capacity(chosen.cache_tokens, chosen.concurrency, config.max_model_len, config.device)
        if config.kv_offload_memory is not None:
            in_memory = dataclasses.replace(
                chosen.cache, num_blocks=config.kv_offload_memory // chosen.cache.block_bytes
            )
            tokens = count_cache_tokens(in_memory, config.max_model_len, config.max_num_batched_tokens)
            size = format_bytes(config.kv_offload_memory)
            lines.append(f"Host memory for evicted blocks: {tokens:,} tokens, {size} for each rank")
        lines.append(f"Fits: {format_sizes(chosen.layout)}")
    if plan.suggested is None:
        lines.append(f"Suggested: nothing; {plan.reason}")
    else:
        lines.append(f"Suggested: {format_sizes(plan.suggested.layout)} ({plan.reason})")
    if "heads do not divide" in plan.reason:
        lines.append("(--tensor-parallel-size may be any number here; the ranks' shares then differ)")
    return "\n".join(lines)


def _describe_hardware(plan: MemoryPlan) -> str:
    hardware = plan.hardware
    if plan.config.device == "cpu":
        return f"{hardware.nodes} CPU machine{'s' * (hardware.nodes > 1)} with {format_bytes(hardware.memory)}"
    return f"{hardware.nodes} x {hardware.ranks_per_node} {hardware.gpu} with {format_bytes(hardware.memory)}"


def _format_table(plan: LayoutPlan) -> list[str]:
    """One line for consecutive ranks that hold the same amounts."""
    rows: list[tuple[str, ...]] = [
        ("rank", "layers", "heads", "KV heads", "weights", "step", "KV cache", "total", "room")
    ]
    for cells, group in itertools.groupby(plan.ranks, key=_format_rank):
        numbers = [rank.rank for rank in group]
        ranks = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        rows.append((ranks, *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _format_rank(rank: RankPlan) -> tuple[str, ...]:
    """The cells of the rank's row, except the rank number."""
    sizes = (rank.weights + rank.adapters + rank.draft_model, rank.activations, rank.kv_cache, rank.total, rank.room)
    return (str(len(rank.layers)), str(rank.heads), str(rank.kv_heads), *map(format_bytes, sizes))


def format_json(plan: MemoryPlan, options: Options, remedies: Sequence[Remedy] = ()) -> dict[str, object]:
    """The plan for programs; sizes in bytes."""
    config = plan.config
    chosen = plan.chosen
    suggested = plan.suggested
    return {
        "model": options.model,
        "architecture": plan.spec.architecture,
        "num_layers": len(plan.spec.layers),
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "device": config.device,
        "max_model_len": config.max_model_len,
        "data_parallel_size": config.data_parallel_size,
        "memory_bytes": plan.hardware.memory,
        "fits": chosen.fits,
        "lacking_bytes": chosen.missing_bytes,
        "lacking_devices": chosen.missing_devices,
        "tensor_parallel_size": chosen.layout.tp_size,
        "pipeline_parallel_size": chosen.layout.pp_size,
        "kv_cache_tokens": chosen.cache_tokens,
        "num_kv_blocks": chosen.cache.num_blocks,
        "maximum_concurrency": round(chosen.concurrency, 2),
        "ranks": [
            {
                "rank": rank.rank,
                "first_layer": rank.layers.start,
                "num_layers": len(rank.layers),
                "heads": rank.heads,
                "kv_heads": rank.kv_heads,
                "weight_bytes": rank.weights,
                "adapter_bytes": rank.adapters,
                "draft_model_bytes": rank.draft_model,
                "activation_bytes": rank.activations,
                "kv_cache_bytes": rank.kv_cache,
                "room_bytes": rank.room,
            }
            for rank in chosen.ranks
        ],
        "suggested": None
        if suggested is None
        else {
            "tensor_parallel_size": suggested.layout.tp_size,
            "pipeline_parallel_size": suggested.layout.pp_size,
            "reason": plan.reason,
        },
        "nodes_needed": plan.nodes_needed,
        "remedies": [remedy.text for remedy in remedies],
    }
