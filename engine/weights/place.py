"""From a checkpoint's tensors to a model in memory: of one at a time this rank's part is read, transformed, fused,
quantised if it is to be, packed and let go.

Strict both ways, before the first weight is read: a tensor that nothing takes, or a parameter that nothing fills, is an
error that names it. Knows no family: a WeightMap says which tensor goes where.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from serve_llm.engine.errors import ModelError
from serve_llm.engine.model.build import Builder, Load, Part, in_float32
from serve_llm.engine.model.decoder import Decoder
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import MLA, ModelSpec
from serve_llm.engine.model.weight_map import Row, WeightMap
from serve_llm.engine.parallel.comm import Neighbours
from serve_llm.engine.quant import fp8, fp8_blocks, int8, mxfp4
from serve_llm.engine.weights.files import Checkpoint
from serve_llm.engine.weights.upload import read_ahead, way_to
from serve_llm.kernels.table import choose

Progress = Callable[[int, int], None]  # parameters placed so far, parameters in all


def load_model(
    directory: Path,
    spec: ModelSpec,
    weight_map: WeightMap,
    *,
    shard: Shard,
    neighbours: Neighbours,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    batch_invariant: bool = False,
    progress: Progress = lambda done, total: None,
) -> Decoder:
    """Build the shard's part of the model of `spec`, with weights of `dtype` on `device`.

    load_format: "auto" reads the checkpoint in `directory`; "dummy" reads nothing and makes random weights from `seed`.
    batch_invariant: of a GPU, see `kernels.table.choose`.
    Raises ModelError when the checkpoint cannot be read or is not what spec and weight_map say.
    """
    if spec.int8 is not None:
        int8.check()
    if spec.fp8:
        fp8.check(device)
    load: Load
    checkpoint = None
    if load_format == "dummy":
        spec = replace(spec, int8=spec.int8 and replace(spec.int8, stored=False))
        load = dummy(seed, dtype, device)
    else:
        checkpoint = Checkpoint(directory)
        spec, sources = assign(checkpoint, spec, weight_map, str(directory))
        if device.type != "cpu":
            read_ahead(checkpoint.paths)
        load = placement(checkpoint, sources, dtype, device)
    expanded = weight_map.expanded(len(spec.layers), spec.int8).values()
    total = sum(shard.holds(parameter, spec) for row in expanded for parameter in row.parameters)
    total += shard.is_first + shard.is_last - (spec.tied_head and shard.is_first and shard.is_last)
    done = 0

    def counted(
        name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        nonlocal done
        tensor = load(name, shape, part, dtype)
        done += 1
        progress(done, total)
        return tensor

    dims: tuple[set[int], set[int]] = set(), set()  # of caches with keys and values, and of latent ones
    for layer in spec.layers:
        dims[isinstance(layer.mixer, MLA)].add(layer.mixer.head_dim)
    kernels = choose(device, dtype, *dims, batch_invariant=batch_invariant)
    decoder = Decoder(spec, Builder(counted, kernels, shard, neighbours, spec.int8, spec.fp8), device)
    if checkpoint is not None:
        checkpoint.release()
    return decoder


def assign(
    checkpoint: Checkpoint, spec: ModelSpec, weight_map: WeightMap, where: str
) -> tuple[ModelSpec, dict[str, tuple[str, Row]]]:
    """Which tensor fills which parameter: parameter -> (the tensor's name in the checkpoint, its row).

    The spec comes back untied if the checkpoint holds a head of its own with other values than the embedding, as
    transformers does. Raises ModelError naming what is missing, or what nobody needs.
    """
    rows = weight_map.expanded(len(spec.layers), spec.int8)
    embedding, head = weight_map.embedding, weight_map.head

    def canonical(name: str) -> str:
        known = (weight_map.prefix, head.removesuffix("weight"))  # the head's bias stands beside it
        return name if name.startswith(known) else weight_map.prefix + name

    stored = {canonical(name): name for name in checkpoint.names}
    if spec.tied_head and embedding in stored and head in stored:
        spec = replace(spec, tied_head=torch.equal(checkpoint.read(stored[embedding]), checkpoint.read(stored[head])))
    if spec.tied_head and embedding not in stored and head in stored:
        embedding = head  # a tied pair may be stored under either name
    rows[embedding] = Row(embedding, ("embedding.weight",))
    if not spec.tied_head:
        rows[head] = Row(head, ("head.weight",))
    if weight_map.block is not None:
        for source in [source for source in rows if f"{source}_scale_inv" in stored]:
            scales = f"{source}_scale_inv"
            rows |= {source: replace(rows[source], scales=scales, block=weight_map.block), scales: Row(scales, ())}

    if missing := sorted(rows.keys() - stored.keys()):
        raise ModelError(f"{where}: the checkpoint lacks {_listed(missing)}")
    used = {stored[source] for source in rows} | {stored.get(head)}
    ignored = re.compile("|".join(weight_map.ignored) or r"(?!)")
    if unused := sorted(name for name in checkpoint.names - used if not ignored.fullmatch(canonical(name))):
        raise ModelError(f"{where}: nothing in a {spec.architecture} uses {_listed(unused)}")
    rows = {source: replace(row, scales=stored.get(row.scales, "")) for source, row in rows.items()}
    return spec, {parameter: (stored[source], row) for source, row in rows.items() for parameter in row.parameters}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def placement(
    checkpoint: Checkpoint, sources: dict[str, tuple[str, Row]], model_dtype: torch.dtype, device: torch.device
) -> Load:
    """The function that reads parameters; what it returns may lie in the mapped file. Weights that have scales come as
    int8, scales as float32. It raises ModelError for a wrong shape or for numbers that are of another kind."""
    put = way_to(device)

    def load(name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if name not in sources:
            raise ModelError(f"no tensor of the checkpoint is known to fill {name}")
        source, row = sources[name]
        each = len(row.parameters) // (row.members or 1)
        stacked, place = divmod(row.parameters.index(name), each)
        sizes = row.sizes or (shape[0],) * each
        own = [range(size) for size in shape]
        if part is not None:
            own[part.dimension] = part.own
        own[0], chosen = _rows(row.groups, sizes, place, own[0])
        expected = [sum(sizes), *shape[1:]]
        if row.transform == "transpose":
            expected.reverse()
            own.reverse()
        if row.members:
            expected.insert(0, row.members)
            own.insert(0, range(stacked, stacked + 1))
        if row.scales and row.block is None:
            return put(chosen(_blocks(checkpoint, source, row.scales, own, expected))).to(dtype)
        _check_shape(checkpoint, source, expected)
        tensor = checkpoint.read(source, tuple(own))
        if row.block is not None:
            tensor = _plain(put(tensor), checkpoint, source, row.scales, row.block, own)
        tensor = tensor[0] if row.members else tensor
        if f"{name}_scale" in sources:
            if tensor.dtype != torch.int8:
                raise ModelError(
                    f"{source} is stored as {tensor.dtype}, but config.json says that it is quantised to int8"
                )
            return put(chosen(tensor))
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise ModelError(
                f"{source} is stored as {tensor.dtype}, but config.json does not say that it is quantised, or it lacks "
                "scales"
            )
        tensor = put(chosen(tensor.T if row.transform == "transpose" else tensor))
        if row.transform == "plus_one":
            tensor = tensor.float() + 1.0
        return tensor.to(torch.float32 if in_float32(name) else dtype or model_dtype)

    return load


def _check_shape(checkpoint: Checkpoint, source: str, expected: Sequence[int]) -> None:
    if checkpoint.shape(source) != tuple(expected):
        raise ModelError(
            f"{source} has shape {list(checkpoint.shape(source))}, but config.json asks for {list(expected)}: "
            "are they of the same model?"
        )


def _blocks(checkpoint: Checkpoint, source: str, scales: str, own: Sequence[range], expected: Sequence[int]) -> Tensor:
    """The part `own` of a stack of matrices, one of them, that is stored as blocks of MXFP4: (rows, columns) float32.
    expected: the shape of the stack."""
    *outer, columns = expected
    if columns % mxfp4.BLOCK:
        raise ModelError(
            f"{source}: config.json asks for rows of {columns} numbers, which are not whole blocks of MXFP4"
        )
    count, wanted = columns // mxfp4.BLOCK, own[-1]
    _check_shape(checkpoint, source, (*outer, count, mxfp4.BLOCK // 2))
    _check_shape(checkpoint, scales, (*outer, count))
    read = (*own[:-1], range(wanted.start // mxfp4.BLOCK, -(-wanted.stop // mxfp4.BLOCK)))
    blocks, exponents = checkpoint.read(source, (*read, range(mxfp4.BLOCK // 2)))[0], checkpoint.read(scales, read)[0]
    if blocks.dtype != torch.uint8 or exponents.dtype != torch.uint8:
        raise ModelError(f"{source} is stored as {blocks.dtype}, but config.json says that it is blocks of MXFP4")
    first = wanted.start - read[-1].start * mxfp4.BLOCK
    return mxfp4.dequantise(blocks, exponents)[:, first : first + len(wanted)]


def _plain(
    numbers: Tensor, checkpoint: Checkpoint, source: str, scales: str, block: tuple[int, int], own: Sequence[range]
) -> Tensor:
    """The part `own` of a matrix of 8-bit floats, in float32 and where `numbers` are."""
    if numbers.dtype != fp8_blocks.DTYPE or numbers.dim() != 2:
        raise ModelError(
            f"{source} has scales, but is stored as {numbers.dtype} with {numbers.dim()} dimensions and not as a "
            f"matrix of {fp8_blocks.DTYPE}"
        )
    _check_shape(checkpoint, scales, [-(-size // of) for size, of in zip(checkpoint.shape(source), block, strict=True)])
    covered = tuple(range(part.start // of, -(-part.stop // of)) for part, of in zip(own, block, strict=True))
    above, left = (part.start - blocks.start * of for part, blocks, of in zip(own, covered, block, strict=True))
    found = checkpoint.read(scales, covered).to(numbers.device)
    return fp8_blocks.dequantise(numbers, found, block, (above, left))


def _rows(groups: int, sizes: tuple[int, ...], place: int, own: range) -> tuple[range, Callable[[Tensor], Tensor]]:
    """Where in its tensor the rows `own` of a parameter are: a range to read, and the function that takes them from it.

    place: of the parameter among those of the tensor. sizes: rows of each. Of several groups those are read that `own`
    reaches into, in whole.
    """
    size, before, stride = (number // groups for number in (sizes[place], sum(sizes[:place]), sum(sizes)))
    if groups == 1:
        return range(before + own.start, before + own.stop), lambda tensor: tensor
    first, last = own.start // size, -(-own.stop // size)

    def chosen(tensor: Tensor) -> Tensor:
        parts = tensor.reshape(last - first, stride, *tensor.shape[1:])[:, before : before + size]
        return parts.flatten(0, 1)[own.start - first * size : own.stop - first * size]

    return range(first * stride, last * stride), chosen


def dummy(seed: int, model_dtype: torch.dtype, device: torch.device) -> Load:
    """Random weights for trying sizes and speeds: each depends on `seed` and its own name only, whatever part of it is
    wanted, and on the device, whose numbers are its own. Norms are near 1."""

    def load(name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) ^ seed)
        values = torch.randn(shape, generator=generator, device=device) * 0.02
        if part is not None:
            values = values.narrow(part.dimension, part.own.start, len(part.own)).clone()
        values = values + 1.0 if name.endswith("norm.weight") else values
        return values.to(torch.float32 if in_float32(name) else dtype or model_dtype)

    return load
