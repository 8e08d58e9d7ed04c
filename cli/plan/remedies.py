"""What would make a model fit. Each remedy has been planned and fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from serve_llm.cli.plan.hardware import GPU_MODELS, HardwareOptions
from serve_llm.cli.plan.planner import LayoutPlan, MemoryPlan
from serve_llm.common.errors import ServeError
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.worker.kv_cache import format_bytes

PlanAgain = Callable[[EngineOptions, HardwareOptions, bool], MemoryPlan]
"""Plan with these options and hardware; the last argument is `states_layout` of `build_plan`. Raises ServeError."""
MAX_LENGTHS_TRIED = 6
MAX_STEPS = 16  # how many numbers of engines are tried one by one


@dataclass(frozen=True)
class Remedy:
    """A change of options after which the model fits."""

    text: str
    options: dict[str, Any] = field(default_factory=dict)  # fields of EngineOptions, with both sizes of the layout
    nodes: int | None = None  # None: the same number of machines

    def apply(self, options: EngineOptions, hardware: HardwareOptions) -> tuple[EngineOptions, HardwareOptions]:
        return replace(options, **self.options), replace(hardware, nodes=self.nodes or hardware.nodes)


def find_remedies(
    plan: MemoryPlan, options: EngineOptions, hardware: HardwareOptions, states_layout: bool, plan_again: PlanAgain
) -> list[Remedy]:
    """The changes that help, smallest first. Empty if the model fits or if nothing helps."""
    if plan.chosen.fits:
        return []
    search = _Search(options, hardware, states_layout, plan_again)
    found: list[Remedy | None] = []
    if plan.suggested is not None:
        found.append(search.try_layout("use", {}, plan.suggested.layout))
    nodes = plan.nodes_needed
    if nodes is not None and nodes > hardware.nodes:
        found.append(search.try_change(f"use {nodes} such machines (--nodes {nodes})", {}, nodes))
    found.append(search.shorten(plan))
    found.append(search.run_fewer_engines(plan))
    tried: list[set[str]] = []
    for change in _list_formats(plan, hardware):
        flags = {f"--{name.replace('_', '-')} {value}" for name, value in change.items()}
        if not any(smaller <= flags for smaller in tried):
            remedy = search.try_change(f"use {' '.join(sorted(flags))}{_state_condition(change, hardware)}", change)
            found.append(remedy)
            tried += [flags] if remedy is not None else []
    return [remedy for remedy in found if remedy is not None]


def describe_shortage(plan: MemoryPlan, remedies: list[Remedy]) -> str:
    """One line for a model that does not fit: how much is missing, what this counts, and what to change."""
    chosen = plan.chosen
    config = plan.config
    advice = ", or ".join(remedy.text for remedy in remedies)
    if chosen.missing_devices:
        count = config.data_parallel_size
        needed = chosen.layout.size * count
        sizes = format_sizes(chosen.layout)
        what = f"one engine with {sizes} needs" if count == 1 else f"{count} engines with {sizes} need"
        fewer = "" if count == 1 else " or fewer engines (--data-parallel-size)"
        return (
            f"it does not fit: {what} {needed} GPUs, but there are {needed - chosen.missing_devices}; "
            f"{advice or f'use more machines{fewer}'}"
        )
    device = "machine" if config.device == "cpu" else "GPU"
    missing = f"with {format_sizes(chosen.layout)} a {device} is short of {format_bytes(chosen.missing_bytes)}"
    return f"it does not fit: {missing}; {advice or 'use devices with more memory'} (counted: {chosen.missing_for})"


def format_sizes(layout: ParallelLayout) -> str:
    """The options for the layout."""
    return f"--tensor-parallel-size {layout.tp_size} --pipeline-parallel-size {layout.pp_size}"


@dataclass(frozen=True)
class _Search:
    """Plans changes of the options, and keeps those that fit."""

    options: EngineOptions
    hardware: HardwareOptions
    states_layout: bool
    plan_again: PlanAgain

    def try_change(self, text: str, change: dict[str, object], nodes: int | None = None) -> Remedy | None:
        """The change with the given layout, or otherwise with the layout that is then suggested."""
        if self.states_layout:
            sizes = {
                "tensor_parallel_size": self.options.tensor_parallel_size,
                "pipeline_parallel_size": self.options.pipeline_parallel_size,
            }
            kept = Remedy(text, sizes | change, nodes)
            if self._plan_remedy(kept, states_layout=True) is not None:
                return kept
        free = Remedy(text, NO_LAYOUT | change, nodes)
        found = self._plan_remedy(free, states_layout=False)
        return None if found is None else self.try_layout(f"{text} with", change, found.layout, nodes)

    def try_layout(
        self, text: str, change: dict[str, object], layout: ParallelLayout, nodes: int | None = None
    ) -> Remedy | None:
        """The change and a layout."""
        sizes = {"tensor_parallel_size": layout.tp_size, "pipeline_parallel_size": layout.pp_size}
        remedy = Remedy(f"{text} {format_sizes(layout)}", NO_LAYOUT | change | sizes, nodes)
        return remedy if self._plan_remedy(remedy, states_layout=True) is not None else None

    def shorten(self, plan: MemoryPlan) -> Remedy | None:
        """The longest request length that fits in the plan's layout."""
        layout = plan.chosen.layout
        tokens = plan.chosen.cache_tokens
        longest = plan.config.max_model_len
        for _ in range(MAX_LENGTHS_TRIED):
            if not 0 < tokens < longest or not self._keeps(layout):
                return None
            text = f"lower --max-model-len to at most {tokens}"
            remedy = self.try_layout(f"{text} with", {"max_model_len": tokens}, layout)
            if remedy is not None:
                return replace(remedy, text=text) if self.states_layout else remedy
            longest = tokens
            tokens = tokens * 9 // 10
        return None

    def run_fewer_engines(self, plan: MemoryPlan) -> Remedy | None:
        """The largest number of data-parallel engines that fit; above MAX_STEPS, only approximately."""
        engines = plan.config.data_parallel_size
        while engines > 1:
            engines = engines - 1 if engines <= MAX_STEPS else max(MAX_STEPS, engines * 3 // 4)
            change: dict[str, object] = {"data_parallel_size": engines}
            if (found := self.try_change(f"lower --data-parallel-size to {engines}", change)) is not None:
                return found
        return None

    def _keeps(self, layout: ParallelLayout) -> bool:
        """Whether the user left the layout open or gave this one."""
        stated = ParallelLayout(self.options.tensor_parallel_size, self.options.pipeline_parallel_size)
        return not self.states_layout or layout == stated

    def _plan_remedy(self, remedy: Remedy, states_layout: bool) -> LayoutPlan | None:
        """The plan of the changed options; None if it does not fit, or if the options conflict."""
        try:
            plan = self.plan_again(*remedy.apply(self.options, self.hardware), states_layout)
        except ServeError:
            return None
        return plan.chosen if plan.chosen.fits else None


NO_LAYOUT: dict[str, object] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "tensor_parallel_split": None,
    "pipeline_parallel_layers": None,
}


def _list_formats(plan: MemoryPlan, hardware: HardwareOptions) -> Iterator[dict[str, object]]:
    """Smaller formats of weights and KV cache, single changes first."""
    config = plan.config
    dtype: list[dict[str, object]] = [{"dtype": "bfloat16"}] if config.dtype == "float32" else []
    on_gpu = config.device != "cpu"
    model = GPU_MODELS.get(hardware.gpu or "")
    has_fp8 = on_gpu and (model is None or model.has_fp8)
    needs_int8 = model is None or not model.has_fp8  # unless fp8, which has the same size, is known to suffice
    weights: list[dict[str, object]] = []
    if config.quantization == "none":
        names = ("fp8",) * has_fp8 + ("int8",) * needs_int8 + ("int4",)
        weights = [{"quantization": name} for name in names]
    cache: list[dict[str, object]] = []
    if config.kv_cache_dtype == "auto":
        if not on_gpu:
            cache = [{"kv_cache_dtype": "int8"}]
        elif model is None or model.takes_fp8_cache:
            cache = [{"kv_cache_dtype": "fp8"}]
    yield from (*dtype, *weights, *cache)
    yield from (first | second for first in weights for second in cache)
    yield from (first | second for first in dtype for second in weights)


def _state_condition(change: dict[str, object], hardware: HardwareOptions) -> str:
    """What a format requires of GPUs of which only the memory is known."""
    if hardware.gpu in GPU_MODELS:
        return ""
    if change.get("kv_cache_dtype") == "fp8":
        return " (on GPUs of compute capability 8.9 or 9.0)"
    return " (on GPUs of compute capability 8.9 or more)" if change.get("quantization") == "fp8" else ""
