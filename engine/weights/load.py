"""Loading a model: match the checkpoint's tensors with the model's parameters, then build the decoder from them.

Matching is strict both ways and comes before the first weight is read: a tensor without a parameter or a parameter
without a tensor is an error that names it.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.engine.model.activation_scales import drop_absent_scales
from serve_llm.engine.model.build import GroupQuantWeightLoader, ModelBuilder, WeightLoader, WeightSlice, load_no_groups
from serve_llm.engine.model.cache_scales import count_cache_scales, find_cache_scales
from serve_llm.engine.model.decoder import Decoder, build_decoder
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.lora import BaseWeights, LoRALayers, ReadRows
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import AttentionSpec, MLASpec, ModelSpec
from serve_llm.engine.model.weight_format import QuantizedModules, ScaledNumbers, WeightFormat
from serve_llm.engine.model.weight_map import WeightMap, WeightRule
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.quantization import fp8
from serve_llm.engine.weights.dummy import build_dummy_group_loader, build_dummy_loader
from serve_llm.engine.weights.files import AnyCheckpoint, Checkpoint, open_checkpoint
from serve_llm.engine.weights.parameters import CheckpointLoader, Source
from serve_llm.engine.weights.upload import read_ahead
from serve_llm.kernels.backends.backend import AttentionForm, UnavailableBackend
from serve_llm.kernels.linear_grouped import GroupQuantWeight
from serve_llm.kernels.registry import Kernels, choose

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # number of parameters loaded so far, total number


class OpenWeights(NamedTuple):
    """A model's parameters, none of which has been read."""

    spec: ModelSpec  # as `match_tensors` returns it
    load: WeightLoader
    load_grouped: GroupQuantWeightLoader
    checkpoint: AnyCheckpoint | None  # None: weights are random


def load_model(
    directory: Path,
    spec: ModelSpec,
    weight_map: WeightMap,
    *,
    shard: Shard,
    groups: ProcessGroups,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    kernels: Kernels | None = None,
    lora: LoRALayers | None = None,
    progress: Progress = lambda done, total: None,
) -> Decoder:
    """Build the shard's part of the model with weights of `dtype` on `device`, and log its tree at debug level.

    load_format: "auto" reads the checkpoint in `directory`; "dummy" reads no file and uses random weights made from
    `seed`. kernels: None: those of `choose_kernels`. lora: where linear layers that adapters can change are recorded.
    Raises ModelError if the checkpoint cannot be read or does not match spec and weight_map.
    """
    opened = open_weights(directory, spec, weight_map, dtype, device, load_format, seed)
    spec = opened.spec
    load = opened.load
    checkpoint = opened.checkpoint
    if checkpoint is not None and device.type != "cpu":
        read_ahead(checkpoint.paths)
    if checkpoint is not None and shard.is_last:
        load = _with_pooler_folders(load, spec, directory, dtype, device)
    report = _Progress(_count_parameters(spec, weight_map, shard), progress)
    builder = ModelBuilder(
        report.counting(load),
        kernels or choose_kernels(spec, dtype, device),
        shard,
        groups,
        spec.int8,
        spec.fp8,
        spec.grouped,
        report.counting_groups(opened.load_grouped),
        dtype,
        device,
        lora,
    )
    decoder = build_decoder(spec, builder, device)
    release = _do_nothing if checkpoint is None else checkpoint.release
    release()
    if lora is not None:
        lora.base_weights = BaseWeights(_build_row_reader(load, spec), release)
    logger.debug("Model:\n%r", decoder)
    return decoder


def open_weights(
    directory: Path,
    spec: ModelSpec,
    weight_map: WeightMap,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    seed: int,
) -> OpenWeights:
    """Match a checkpoint's tensors with the parameters. Arguments and errors as in `load_model`."""
    if spec.fp8:
        fp8.check(device)
    if load_format == "dummy":
        spec = _quantise_int8_at_load(spec)
        load_grouped: GroupQuantWeightLoader = load_no_groups
        if spec.grouped is not None and spec.grouped.in_checkpoint:
            load_grouped = build_dummy_group_loader(seed, spec.grouped, device)
        return OpenWeights(spec, build_dummy_loader(seed, dtype, device), load_grouped, None)
    checkpoint = open_checkpoint(directory)
    spec, sources = match_tensors(checkpoint, spec, weight_map, str(directory))
    stored = CheckpointLoader(checkpoint, sources, dtype, device)
    return OpenWeights(spec, stored, stored.read_grouped, checkpoint)


def _do_nothing() -> None:
    pass


def _build_row_reader(load: WeightLoader, spec: ModelSpec) -> ReadRows:
    def read_rows(name: str, shape: tuple[int, int], rows: range) -> Tensor:
        if name == "head.weight" and spec.tie_word_embeddings:
            name = "embedding.weight"
        part = WeightSlice(0, rows)
        weight = load(name, shape, part)
        if weight.dtype == torch.int8:
            return weight * load(f"{name}_scale", (shape[0], 1), part)
        return weight.float()

    return read_rows


def match_tensors(
    checkpoint: AnyCheckpoint, spec: ModelSpec, weight_map: WeightMap, where: str
) -> tuple[ModelSpec, dict[str, Source]]:
    """Find the tensor of each parameter. where: names the checkpoint in errors.

    As in transformers, the returned spec has no tied embeddings if the checkpoint holds an LM head whose values differ
    from the embedding's. Raises ModelError that names tensors which are missing or unused.
    """
    complete = (weight_map.prefix, weight_map.head.removesuffix("weight"), *weight_map.outside)

    def add_prefix(name: str) -> str:
        """Checkpoints of the bare base model lack the prefix."""
        for stored_word, word in weight_map.other_words:
            name = name.replace(stored_word, word)
        for stored_prefix, prefix in weight_map.prefixes:
            if name.startswith(stored_prefix):
                return prefix + name.removeprefix(stored_prefix)
        return name if name.startswith(complete) else weight_map.prefix + name

    stored = {add_prefix(name): name for name in checkpoint.names}
    spec = _untie_different_head(checkpoint, spec, weight_map, stored)
    spec, weight_map = drop_absent_scales(spec, weight_map, stored)
    rules = _expand_rules(spec, weight_map, stored)
    spec, scales = find_cache_scales(spec, rules, stored)
    rules = _read_as_quantised(checkpoint, rules, weight_map, stored) | scales
    if missing := sorted(rules.keys() - stored.keys()):
        raise ModelError(f"{where}: the checkpoint lacks {_list(missing)}")
    used = {stored[tensor] for tensor in rules} | {stored.get(weight_map.head)}
    ignored = re.compile("|".join(weight_map.ignored) or r"(?!)")
    unused = sorted(name for name in checkpoint.names - used if not ignored.fullmatch(add_prefix(name)))
    if unused:
        raise ModelError(f"{where}: no parameter of a {spec.architecture} uses {_list(unused)}")
    sources = {}
    for tensor, rule in rules.items():
        source = Source(stored[tensor], replace(rule, scales=stored.get(rule.scales, "")))
        sources.update(dict.fromkeys(rule.parameters, source))
    return spec, sources


def _untie_different_head(
    checkpoint: AnyCheckpoint, spec: ModelSpec, weight_map: WeightMap, stored: Mapping[str, str]
) -> ModelSpec:
    embedding = stored.get(weight_map.embedding)
    head = stored.get(weight_map.head)
    if not spec.tie_word_embeddings or embedding is None or head is None or not spec.reads_lm_head:
        return spec
    is_equal = torch.equal(checkpoint.read(embedding), checkpoint.read(head))
    return replace(spec, tie_word_embeddings=is_equal)


def _expand_rules(spec: ModelSpec, weight_map: WeightMap, stored: Mapping[str, str]) -> dict[str, WeightRule]:
    """Tensor name, with the prefix -> its rule, for all tensors of the model. stored: the names in the checkpoint."""
    rules = weight_map.expand(len(spec.layers), spec.int8)
    modules = {name.rpartition(".")[0] for name in stored}  # a quantised one has no tensor of the name "weight"
    weight_map.choose_stacks(rules, len(spec.layers), stored.keys() | {f"{module}.weight" for module in modules})
    embedding = weight_map.embedding
    if spec.tie_word_embeddings and embedding not in stored and weight_map.head in stored:
        embedding = weight_map.head  # tied weights may be stored under either name
    rules[embedding] = WeightRule(embedding, ("embedding.weight",))
    if spec.reads_lm_head and not spec.tie_word_embeddings:
        rules[weight_map.head] = WeightRule(weight_map.head, ("head.weight",))
    return rules


def _read_as_quantised(
    checkpoint: AnyCheckpoint, rules: dict[str, WeightRule], weight_map: WeightMap, stored: Mapping[str, str]
) -> dict[str, WeightRule]:
    """Return the rules with the tensors of quantised modules instead of their weights. stored: as `_expand_rules`."""
    result: dict[str, WeightRule] = {}
    for tensor, rule in rules.items():
        module = tensor.removesuffix(".weight")
        if rule.members and (stack := _find_stack_format(weight_map, tensor, stored)) is not None:
            scales = f"{tensor}{stack.scale.removeprefix('weight')}"
            result[tensor] = replace(rule, module=stored.get(tensor, tensor), format=stack)
            result[scales] = WeightRule(scales, ())
            continue
        form = None
        if module != tensor and weight_map.quantized is not None:
            form = _find_format(weight_map, weight_map.quantized, module, stored)
        if form is None:
            result[tensor] = rule
            continue
        if rule.members:
            raise ModelError(f"{tensor}: quantised weights of several experts in one tensor are not supported")
        weight = f"{module}.{form.weight}"
        result[weight] = replace(rule, module=stored.get(weight, weight).removesuffix(f".{form.weight}"), format=form)
        unread = [f"{module}.{suffix}" for suffix in form.required]
        unread += [f"{module}.{suffix}" for suffix in form.optional if f"{module}.{suffix}" in stored]
        # AutoGPTQ and AutoAWQ write zero biases for modules that have none.
        bias = f"{module}.bias"
        if bias in stored and bias not in rules and not checkpoint.read(stored[bias]).any():
            unread.append(bias)
        result |= {name: WeightRule(name, ()) for name in unread}
    return result


def _find_stack_format(weight_map: WeightMap, tensor: str, stored: Mapping[str, str]) -> ScaledNumbers | None:
    """Return the format of a stack of experts; None unless it has 8-bit numbers without zero points and scales."""
    if weight_map.quantized is None:
        return None
    form = weight_map.quantized.find_format(*weight_map.list_spellings(tensor.removesuffix(".weight")))
    if not isinstance(form, ScaledNumbers) or form.has_zeros or (form.kind == "int8" and form.strategy == "block"):
        return None
    names = [name for name in (form.scale, form.other_scale) if name]
    found = [name for name in names if f"{tensor}{name.removeprefix('weight')}" in stored]
    return replace(form, scale=found[0]) if found else None


def _find_format(
    weight_map: WeightMap, quantized: QuantizedModules, module: str, stored: Mapping[str, str]
) -> WeightFormat | None:
    """Return None if the module is not quantised, or the checkpoint lacks the tensor that determines it."""
    is_embedding = weight_map.embedding == f"{module}.weight"
    find = quantized.find_embedding_format if is_embedding else quantized.find_format
    form = find(*weight_map.list_spellings(module))
    if isinstance(form, ScaledNumbers) and form.other_scale and f"{module}.{form.other_scale}" in stored:
        return replace(form, scale=form.other_scale)
    return None if form is None or f"{module}.{form.marker}" not in stored else form


def _with_pooler_folders(
    load: WeightLoader, spec: ModelSpec, directory: Path, dtype: torch.dtype, device: torch.device
) -> WeightLoader:
    """Return `load` extended by the weights of the pooler's layers that are stored in separate folders."""
    loaders: dict[str, WeightLoader] = {}
    for layer in spec.pooler.layers if spec.pooler is not None else ():
        if layer.folder:
            kinds = ("weight", "bias") if layer.bias else ("weight",)
            sources = {
                f"pooler.{layer.name}.{kind}": Source(
                    f"linear.{kind}", WeightRule(f"linear.{kind}", (f"pooler.{layer.name}.{kind}",))
                )
                for kind in kinds
            }
            folder = CheckpointLoader(Checkpoint(directory / layer.folder), sources, dtype, device)
            loaders.update(dict.fromkeys(sources, folder))

    def load_from_either(
        name: str, shape: tuple[int, ...], part: WeightSlice | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return loaders.get(name, load)(name, shape, part, dtype)

    return load_from_either if loaders else load


def _list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _count_parameters(spec: ModelSpec, weight_map: WeightMap, shard: Shard) -> int:
    """Count the parameters that `build_decoder` reads on this rank."""
    rules = weight_map.expand(len(spec.layers), spec.int8).values()
    count = sum(shard.holds(parameter, spec) for rule in rules for parameter in rule.parameters)
    count += count_cache_scales(spec, shard)
    if spec.pooler is not None and shard.is_last:
        count += sum(1 + layer.bias for layer in spec.pooler.layers if layer.folder) + len(spec.pooler.token_ids)
    reads_head = spec.lm_head and shard.is_last
    is_read_once = spec.tie_word_embeddings and shard.is_first
    return count + shard.is_first + (reads_head and not is_read_once)


class _Progress:
    """Reports each parameter that is loaded."""

    def __init__(self, total: int, report: Progress) -> None:
        self._done = 0
        self._total = total
        self._report = report

    def _advance(self) -> None:
        self._done += 1
        self._report(self._done, self._total)

    def counting(self, load: WeightLoader) -> WeightLoader:
        def load_and_report(
            name: str, shape: tuple[int, ...], part: WeightSlice | None = None, dtype: torch.dtype | None = None
        ) -> Tensor:
            tensor = load(name, shape, part, dtype)
            self._advance()
            return tensor

        return load_and_report

    def counting_groups(self, load: GroupQuantWeightLoader) -> GroupQuantWeightLoader:
        def load_and_report(name: str, shape: tuple[int, int], part: WeightSlice) -> GroupQuantWeight | None:
            weight = load(name, shape, part)
            if weight is not None:
                self._advance()
            return weight

        return load_and_report


def _quantise_int8_at_load(spec: ModelSpec) -> ModelSpec:
    """Return the spec for random weights in floating point."""
    return spec if spec.int8 is None else replace(spec, int8=replace(spec.int8, in_checkpoint=False))


def choose_kernels(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    attention_backend: str = "auto",
    cache_dtype: torch.dtype | None = None,
) -> Kernels:
    """Choose the kernels for the model. batch_invariant and later arguments: see `kernels.registry.choose`.

    Raises OptionError if the attention backend cannot be used.
    """
    mixers = [layer.attention for layer in spec.layers]
    attentions = [mixer for mixer in mixers if not isinstance(mixer, GatedDeltaNetSpec)]
    with refuse_unavailable_backend(attention_backend):
        return choose(
            device,
            dtype,
            {attention.cached_head_dim for attention in attentions if not isinstance(attention, MLASpec)},
            {attention.head_dim for attention in attentions if isinstance(attention, MLASpec)},
            attention_forms={_attention_form(attention) for attention in attentions if attention.causal},
            attention_backend=attention_backend,
            batch_invariant=batch_invariant,
            cache_dtype=cache_dtype,
        )


@contextlib.contextmanager
def refuse_unavailable_backend(asked: str) -> Iterator[None]:
    """Raise OptionError instead of UnavailableBackend. asked: the value of --attention-backend."""
    try:
        yield
    except UnavailableBackend as error:
        raise OptionError(f"--attention-backend {asked}: {error}; use auto, or omit it") from error


def _attention_form(attention: AttentionSpec | MLASpec) -> AttentionForm:
    if isinstance(attention, MLASpec):
        return AttentionForm(attention.head_dim, attention.kv_lora_rank)
    return AttentionForm(
        attention.cached_head_dim,
        has_window=attention.sliding_window is not None and not attention.chunked,
        has_softcap=attention.softcap is not None,
        has_sinks=attention.sinks,
        has_alibi=attention.alibi_slopes is not None,
    )
