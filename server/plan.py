"""`serve-llm plan <model>`: whether it fits, and how to spread it, as a table or as JSON. Reads config.json only."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Mapping, Sequence

from serve_llm.engine.arguments import by_flag, make_parser, merge
from serve_llm.engine.arguments import read_command_line as read_flags
from serve_llm.engine.errors import CapacityError
from serve_llm.engine.given import build
from serve_llm.engine.hub import find_config
from serve_llm.engine.machines import Machines
from serve_llm.engine.options import Options, fields
from serve_llm.engine.plan import GridPlan, Plan, RankPlan, capacity_lines, make_plan, size_text

DAEMON_OPTIONS = (
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
    "data_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_memory",
    "kv_cache_dtype",
    "block_size",
    "allow_unknown_config",
)
DESCRIPTION = (
    "Say whether a model fits, what every rank would hold and how to spread it, from its config.json alone. "
    "The options that both have mean what they mean to the daemon."
)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Prints the plan; returns 0 if the model fits. Raises ServeError: CapacityError if it does not, after the plan."""
    options, machines, as_json = read_command_line(argv, environ)
    plan = make_plan(options, machines, find_config(options.model, options.revision, options.download_dir))
    text = json.dumps(as_data(plan, options), indent=2) if as_json else as_text(plan, options)
    sys.stdout.write(text + "\n")
    if not plan.chosen.fits:
        raise CapacityError(what_would_help(plan))
    return 0


def read_command_line(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Options, Machines, bool]:
    """The daemon's options, the machines, and whether JSON is wanted. Raises OptionError."""
    own = dataclasses.fields(Machines)
    options = [option for option in fields() if option.name in DAEMON_OPTIONS] + [*own]
    parser = make_parser("serve-llm plan", DESCRIPTION, options)
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    given = read_flags(parser, options, argv)
    as_json = bool(given.pop("json", False))
    names = {option.name for option in own}
    machines = build(Machines, by_flag(Machines, {name: given.pop(name) for name in names & given.keys()}))
    return merge(given, environ), machines, as_json


def as_text(plan: Plan, options: Options) -> str:
    """The plan for people."""
    config, spec = plan.config, plan.spec
    lines = [
        f"{options.model}: {spec.architecture}, {len(spec.layers)} layers, {config.types}, "
        f"up to {config.max_model_len:,} tokens per request, on {_machines(plan)}",
        "",
        *_table(plan.chosen),
        "",
    ]
    if config.data_parallel_size > 1:
        lines.append(f"Each of the {config.data_parallel_size} data-parallel engines:")
    if plan.chosen.fits:
        lines += capacity_lines(plan.chosen.cache_tokens, plan.chosen.concurrency, config.max_model_len, config.device)
        lines.append(f"Fits: {_sizes(plan.chosen)}")
    if plan.suggested is None:
        lines.append(f"Suggested: nothing; {plan.reason}")
    else:
        lines.append(f"Suggested: {_sizes(plan.suggested)} ({plan.reason})")
    if "heads do not divide" in plan.reason:
        lines.append("(--tensor-parallel-size may be any number here; the ranks' shares then differ)")
    return "\n".join(lines)


def _machines(plan: Plan) -> str:
    there = plan.machinery
    if plan.config.device == "cpu":
        return f"{there.nodes} CPU machine{'s' * (there.nodes > 1)} with {size_text(there.memory)}"
    return f"{there.nodes} x {there.per_node} {there.kind} with {size_text(there.memory)}"


def _sizes(grid: GridPlan) -> str:
    return f"--tensor-parallel-size {grid.grid.tensor} --pipeline-parallel-size {grid.grid.pipeline}"


def _table(grid: GridPlan) -> list[str]:
    """One line for consecutive ranks that hold the same."""
    rows: list[tuple[str, ...]] = [
        ("rank", "layers", "heads", "KV heads", "weights", "step", "KV cache", "total", "room")
    ]
    for _, same in itertools.groupby(grid.ranks, key=lambda rank: (len(rank.layers), _figures(rank))):
        first, *_, last = [*same] * 2
        ranks = str(first.rank) if first is last else f"{first.rank}-{last.rank}"
        rows.append((ranks, str(len(first.layers)), *_figures(first)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _figures(rank: RankPlan) -> tuple[str, ...]:
    sizes = (rank.weights, rank.activations, rank.kv_cache, rank.total, rank.room)
    return (str(rank.heads), str(rank.kv_heads), *map(size_text, sizes))


def what_would_help(plan: Plan) -> str:
    """One line for a model that does not fit: by how much, and what to change."""
    grid, config = plan.chosen, plan.config
    device = "machine" if config.device == "cpu" else "GPU"
    ways = []
    if plan.suggested is not None:
        ways.append(f"use {_sizes(plan.suggested)}")
    if plan.nodes_needed is not None and plan.nodes_needed > plan.machinery.nodes:
        ways.append(f"use {plan.nodes_needed} such machines (--nodes {plan.nodes_needed})")
    if 0 < grid.cache_tokens < config.max_model_len:
        ways.append(f"lower --max-model-len to at most {grid.cache_tokens}")
    if config.dtype == "float32":
        ways.append("take --dtype bfloat16")
    if config.device == "cpu" and config.quantization == "none":
        ways.append("take --quantization int8")
    if config.device == "cpu" and config.kv_cache_dtype == "auto":
        ways.append("take --kv-cache-dtype int8")
    ways = ways or ["take devices with more memory"]
    return (
        f"it does not fit: with {_sizes(grid)} a {device} is short of {size_text(grid.lacking)}; {', or '.join(ways)}"
    )


def as_data(plan: Plan, options: Options) -> dict[str, object]:
    """The plan for programs; sizes in bytes."""
    config, spec, grid = plan.config, plan.spec, plan.chosen
    return {
        "model": options.model,
        "architecture": spec.architecture,
        "num_layers": len(spec.layers),
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "device": config.device,
        "max_model_len": config.max_model_len,
        "data_parallel_size": config.data_parallel_size,
        "memory_bytes": plan.machinery.memory,
        "fits": grid.fits,
        "lacking_bytes": grid.lacking,
        **_grid_data(grid),
        "kv_cache_tokens": grid.cache_tokens,
        "num_kv_blocks": grid.layout.num_blocks,
        "maximum_concurrency": round(grid.concurrency, 2),
        "ranks": [_rank_data(rank) for rank in grid.ranks],
        "suggested": None if plan.suggested is None else _grid_data(plan.suggested) | {"reason": plan.reason},
        "nodes_needed": plan.nodes_needed,
    }


def _grid_data(grid: GridPlan) -> dict[str, object]:
    return {"tensor_parallel_size": grid.grid.tensor, "pipeline_parallel_size": grid.grid.pipeline}


def _rank_data(rank: RankPlan) -> dict[str, object]:
    return {
        "rank": rank.rank,
        "layers": [*rank.layers],
        "heads": rank.heads,
        "kv_heads": rank.kv_heads,
        "weight_bytes": rank.weights,
        "activation_bytes": rank.activations,
        "kv_cache_bytes": rank.kv_cache,
        "room_bytes": rank.room,
    }
