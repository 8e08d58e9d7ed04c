"""Every Triton kernel on the card, at the shapes of models and at unusual ones, against plain torch in float32.

`--rehearse`: in Triton's interpreter, tiny.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from parts import common
from parts.attention import TOLERANCE, difference
from serve_llm.kernels import activation, delta_rule, linear_fp8, moe, norm, registry, rope
from serve_llm.kernels import torch_sampling as definition
from serve_llm.kernels.delta_rule import DeltaRule, DraftCounts
from serve_llm.kernels.lora import ExpansionWeight, OutputScale
from serve_llm.kernels.registry import Kernels
from serve_llm.kernels.sampling import BANNED, REPEATED, SPAN_COLUMNS, DeviceSamplingKernels, LogitAdjustments
from support import experts, grouped, triton_rounding

BF16 = torch.bfloat16
Found = Iterator[tuple[str, float, float]]  # name, difference, its limit


class Numbers:
    """Random tensors on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(1)

    def __call__(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device).to(dtype)


def norms(kernels: Kernels, random: Numbers, widths: tuple[int, ...]) -> Found:
    for width in widths:
        for rows in (1, 3, 300):
            x, delta = random(rows, width) * 3, random(rows, width)
            for weight in (random(width), random(width, dtype=torch.float32)):
                wanted = norm.rms_norm(x.float(), weight.float(), 1e-6)
                yield "rms_norm", difference(kernels.rms_norm(x, weight, 1e-6), wanted), 1e-2
                total = x + delta
                wanted = norm.rms_norm(total.float(), weight.float(), 1e-6)
                found, normed = kernels.add_rms_norm(x, delta.clone(), weight, 1e-6)
                yield "add_rms_norm", max(difference(found, total), difference(normed, wanted)), 1e-2
            weight, bias = random(width), random(width)
            wanted = norm.layer_norm(x.float(), weight.float(), bias.float(), 1e-6)
            yield "layer_norm", difference(kernels.layer_norm(x, weight, bias, 1e-6), wanted), 1e-2


def activations(kernels: Kernels, random: Numbers, widths: tuple[int, ...]) -> Found:
    for width in widths:
        for name, call in kernels.activations.items():
            x = random(33, 2 * width) * 2
            yield f"activation {name}", difference(call(x), registry.PORTABLE.activations[name](x.float())), 1e-2


def ropes(kernels: Kernels, random: Numbers, shapes: tuple[tuple[int, int, int], ...]) -> Found:
    """Check the queries, and the whole cache: values that are not written must be unchanged."""
    for heads, kv_heads, size in shapes:
        for tokens in (1, 5, 300):
            qkv, blocks = random(tokens, (heads + 2 * kv_heads) * size), tokens // 16 + 2
            angles = (random(tokens, size // 2, dtype=torch.float32).cos(), random(tokens, size // 2).float().sin())
            weights = rope.HeadNorms(random(size), random(size), 1e-6)
            cache = random(blocks, 2, kv_heads, 16, size)
            slots = torch.randperm(blocks * 16, device=random.device)[:tokens]
            for norms_of_heads in (None, weights):
                ours, theirs = cache.clone(), cache.float()
                wide = (
                    None if norms_of_heads is None else rope.HeadNorms(weights.query.float(), weights.key.float(), 1e-6)
                )
                query = kernels.rope_and_cache(qkv.clone(), heads, norms_of_heads, angles, ours, slots)
                wanted = rope.rope_and_cache(qkv.float(), heads, wide, angles, theirs, slots)
                yield (
                    "rope_and_cache",
                    max(difference(query, wanted), difference(ours, theirs)),
                    2e-2,
                )  # rounded three times
            kept = cache.clone()
            kernels.rope_and_cache(qkv.clone(), heads, None, angles, kept, torch.full_like(slots, -1))
            yield "rope_and_cache of tokens without a slot", float(not torch.equal(kept, cache)), 0.5


def latent_ropes(kernels: Kernels, random: Numbers, shape: tuple[int, int, int]) -> Found:
    heads, rank, size = shape
    for tokens in (1, 5, 300):
        blocks = tokens // 16 + 2
        query, latent, weight = random(tokens, heads, size), random(tokens, rank + size), random(rank)
        angles = (random(tokens, size // 2).float().cos(), random(tokens, size // 2).float().sin())
        ours = random(blocks, 1, 1, 16, rank + size)
        theirs, slots = ours.float(), torch.randperm(blocks * 16, device=random.device)[:tokens]
        turned = kernels.rope_and_latent(query, latent, weight, 1e-6, angles, ours, slots)
        wanted = rope.rope_and_latent(query.float(), latent.float(), weight.float(), 1e-6, angles, theirs, slots)
        yield "rope_and_latent", max(difference(turned, wanted), difference(ours, theirs)), 1e-2


def delta_rules(kernels: Kernels, random: Numbers, sizes: tuple[int, int, int, int], tokens: int) -> Found:
    """Check a sequence that continues next to a new one. sizes: key heads, heads per key head, key_dim, value_dim."""
    key_heads, group, key_dim, value_dim = sizes
    heads = key_heads * group
    channels = 2 * key_heads * key_dim + heads * value_dim
    layer = DeltaRule(
        conv=random(4, channels) * 0.5,
        decay=random(heads, dtype=torch.float32),
        decay_bias=random(heads, dtype=torch.float32),
        key_heads=torch.arange(heads, device=random.device) // group,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    kept = 2  # drafts for which there is room
    ours = random(3, layer.state_size + kept * (channels + 2 * heads), dtype=torch.float32) * 0.1
    theirs = ours.clone()
    qkv, gates = random(tokens + 1, channels), random(tokens + 1, 2 * heads)
    lengths = ([0, tokens, tokens + 1], [tokens, 9])
    found = kernels.gated_delta_rule(qkv, gates, layer, ours, [2, 0], *lengths)
    wanted = delta_rule.gated_delta_rule(qkv, gates, layer, theirs, [2, 0], *lengths)
    yield "gated_delta_rule", difference(found, wanted), 3e-2
    states = [layer.split_cache(cache)[1][[0, 2], ..., :value_dim] for cache in (ours, theirs)]
    yield "gated_delta_rule, states", difference(*states), 3e-2
    drafts = DraftCounts([1, 0], [2, 0])
    lengths = ([0, tokens, tokens + 1], [tokens + 9, 10])
    found = kernels.gated_delta_rule(qkv, gates, layer, ours, [2, 0], *lengths, drafts=drafts)
    wanted = delta_rule.gated_delta_rule(qkv, gates, layer, theirs, [2, 0], *lengths, drafts=drafts)
    states = [layer.split_cache(cache)[1][[0, 2], ..., :value_dim] for cache in (ours, theirs)]
    kept_inputs = [layer.split_drafts(cache)[0] for cache in (ours, theirs)]
    worst = max(difference(found, wanted), difference(*states), difference(*kept_inputs))
    yield "gated_delta_rule, drafts", worst, 3e-2


def products(kernels: Kernels, random: Numbers, shapes: tuple[tuple[int, int], ...]) -> Found:
    """Check batch-invariant products; rows alone have the same bits as among others."""
    for outputs, inputs in shapes:
        for dtype in (BF16, torch.float32):
            weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype)
            layer, x = kernels.pack(weight, bias), random(300, inputs, dtype=dtype)
            y = layer(x)
            wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
            yield f"--batch-invariant product, {dtype}", difference(y, wanted), TOLERANCE[dtype]
            alone = all(torch.equal(layer(x[:rows]), y[:rows]) for rows in (1, 7, 64))
            yield "--batch-invariant product, rows alone", float(not alone), 0.5


def products_fp8(kernels: Kernels, random: Numbers, shapes: tuple[tuple[int, int], ...]) -> Found:
    for outputs, inputs in shapes:
        weight, scale = linear_fp8.quantise_rows(random(outputs, inputs), inputs)
        layer, exact = kernels.pack_fp8(weight, scale, None), weight.double() * scale.double()
        for rows in (1, 17, 300):
            x = random(rows, inputs)
            numbers, scales = linear_fp8.quantise_rows(x, inputs)
            wanted = (numbers.double() * scales.double()) @ exact.t()
            yield "fp8 product over the rounded numbers", difference(layer(x), wanted), 2e-2  # added with 14 bits


def products_packed(kernels: Kernels, random: Numbers, shapes: tuple[tuple[int, int], ...]) -> Found:
    """Check weights of 4 and 8 bits in every format, against the definition's weight."""
    for outputs, inputs in shapes:
        for form in grouped.FORMS:
            weight = grouped.make_weight(form, outputs, inputs, 16 if form == "nvfp4" else 32)
            exact = weight.dequantise().to(random.device)
            layer = kernels.pack_grouped(weight.to(random.device), None, BF16)
            for rows in (1, 17, 300):
                x = random(rows, inputs)
                yield f"weights in groups, {form}", difference(layer(x), x.float() @ exact.t()), 2e-2


def mixtures(
    kernels: Kernels, random: Numbers, shapes: tuple[tuple[int, int, int, int, int], ...], dtype: torch.dtype = BF16
) -> Found:
    for tokens, count, chosen, width, inner in shapes:
        made = experts.make_case(tokens, count, chosen, width, inner, dtype)
        x, weights, numbers, first, last = (
            tensor.to(random.device) for tensor in (made.x, made.weights, made.experts, made.first, made.last)
        )
        pairs = ((kernels.pack(one, None), kernels.pack(other, None)) for one, other in zip(first, last, strict=True))
        ours = kernels.pack_experts(pairs, kernels.activations["silu_and_mul"], range(count))
        wide = ((_plain(one), _plain(other)) for one, other in zip(first, last, strict=True))
        plain = moe.pack_experts(wide, activation.silu_and_mul, range(count))
        yield "experts", difference(ours(x, weights, numbers), plain(x.float(), weights, numbers)), 2e-2


def _plain(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x @ weight.float().t()


def drawing(kernels: DeviceSamplingKernels, random: Numbers, rows: int, columns: int) -> Found:
    """Yield the shares of rows with a different answer: a draw at a boundary may go to either side."""
    logits = random(rows, columns) * 3
    pick = torch.Generator().manual_seed(2)
    uniform = torch.rand((3, rows), generator=pick, dtype=torch.float64)
    off = torch.zeros(rows, dtype=torch.float64)
    ones = off + 1.0
    ways = {
        "greedy": (off, off, ones, off),
        "drawn from all": (ones, off, ones, off),
        "top_k": (ones, (uniform[1] * 200).ceil(), ones, off),
        "top_p": (ones * 0.8, off, 0.05 + 0.94 * uniform[1], off),
        "min_p": (ones * 1.3, off, ones, uniform[1] * 0.5),
        "all filters": (0.2 + 2 * uniform[2], (uniform[1] * 99).ceil(), 0.5 + 0.49 * uniform[1], uniform[2] * 0.02),
    }
    for name, fields in ways.items():
        draws = torch.stack((*fields, uniform[0]), 1).to(random.device)
        found = kernels.sample(logits, draws, sampled=name != "greedy", filtered=True)
        share = (found != definition.sample(logits, draws)).double().mean()
        yield f"sampling: {name}", float(share), 1e-9 if name == "greedy" else 0.05
    broken = logits[:2].clone()
    broken[1, columns // 2] = torch.nan
    draws = torch.zeros((2, 5), dtype=torch.float64, device=random.device)
    yield "sampling: NaN is told", float(kernels.sample(broken, draws)[1] != -1), 0.5


def log_probabilities(kernels: DeviceSamplingKernels, random: Numbers, rows: int, columns: int) -> Found:
    logits = random(rows, columns) * 3
    ids = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(3)).to(random.device)
    ours, theirs = (version.log_softmax_gather(logits, ids, 20) for version in (kernels, definition))
    same = torch.equal(ours.rank, theirs.rank) and torch.equal(ours.top_ids, theirs.top_ids)
    yield "log-softmax: ranks and the 20 likeliest", float(not same), 0.5
    yield "log-softmax", float((ours.logprob - theirs.logprob).abs().max()), 1e-5


def penalties(kernels: DeviceSamplingKernels, random: Numbers, columns: int) -> Found:
    pick = torch.Generator().manual_seed(4)
    changed = torch.randperm(columns, generator=pick)[:SPAN_COLUMNS].sort().values.int()
    entries = torch.empty((len(changed), 4), dtype=torch.int32)
    entries[:, 0] = changed
    entries[:, 2] = torch.randint(0, (BANNED | REPEATED) + 1, (len(changed),), generator=pick)
    for column in (1, 3):
        entries[:, column] = torch.randn(len(changed), generator=pick).view(torch.int32)
    penalty, end = int(torch.tensor(1.3).view(torch.int32)), min(SPAN_COLUMNS, columns)
    last = int(torch.searchsorted(changed, end))
    spans = torch.tensor([[2, 0, len(changed), penalty, 0, 0], [1, 0, last, penalty, 0, end]], dtype=torch.int32)
    edits = LogitAdjustments(entries.to(random.device), spans.to(random.device))
    ours = random(4, columns, dtype=torch.float32)
    theirs = ours.clone()
    kernels.adjust(ours, edits)
    definition.adjust(theirs, edits)
    finite = theirs.isfinite()
    yield "bans", float(not torch.equal(ours.isfinite(), finite)), 0.5
    yield "bias and penalties", float((ours - theirs)[finite].abs().max()), 1e-5


def adapters(
    kernels: Kernels, random: Numbers, sizes: tuple[tuple[int, tuple[int, ...], int], ...], counts: tuple[int, ...]
) -> Found:
    """Check three adapters of a layer, the last one with DoRA's factors, and an empty slot. sizes: inputs, parts, rank.
    counts: of rows."""
    assert kernels.allocate_lora_slots is not None
    for inputs, parts, rank in sizes:
        held = kernels.allocate_lora_slots(4, rank, inputs, parts, BF16, random.device)
        ends = list(accumulate(parts))
        weights = []
        for slot in range(3):
            down, up = random(len(parts) * rank, inputs) / inputs**0.5, random(sum(parts), rank)
            factor = 1 + 0.1 * random(sum(parts), dtype=torch.float32) if slot == 2 else None
            expansions = []
            for number, (first, end) in enumerate(pairwise([0, *ends])):
                scale = None if factor is None else OutputScale(factor[first:end], None)
                columns = slice(number * rank, (number + 1) * rank)
                expansions.append(ExpansionWeight(columns, slice(first, end), up[first:end], scale))
            held.put(slot, down, expansions)
            weights.append((down, expansions))
        for rows in counts:
            x, ours = random(rows, inputs), random(rows, sum(parts))
            wanted = ours.float()
            slots = torch.arange(rows, device=random.device) % 5 - 1
            for slot, (down, expansions) in enumerate(weights):
                own = slots == slot
                for columns, outputs, up, scale in expansions:
                    before = wanted[own, outputs]
                    before = before if scale is None else before * scale.factor
                    hidden = x[own].float() @ down[columns].float().t()
                    wanted[own, outputs] = before + hidden @ up.float().t()
            held.add(ours, x, slots)
            yield "adapters", difference(ours, wanted), 2e-2


def tell(here: common.Place, found: Found, expected: str) -> None:
    """Report one row for each name, with the largest difference. expected: the name of the row if an error ends
    everything."""
    worst: dict[str, tuple[float, float]] = {}
    try:
        for name, value, most in found:
            value = math.inf if math.isnan(value) else value  # comparisons never find NaN
            worst[name] = max(worst.get(name, (0.0, most)), (value, most))
        common.wait()
    except Exception as error:  # the next kernel may work
        here.report.check(expected, False, repr(error)[:200])
    for name, (value, most) in worst.items():
        here.report.check(name, value < most, f"{value:.1e}")


def choose(batch_invariant: bool = False) -> Kernels:
    found = registry.with_triton(batch_invariant)
    assert isinstance(found, Kernels), found
    return found


def check(here: common.Place) -> None:
    from serve_llm.kernels.triton import sampling

    device = torch.device(here.device)
    random, tiny = Numbers(device), here.rehearse
    kernels = choose()
    columns = here.sized(128256, 5000)
    tell(here, norms(kernels, random, (57,) if tiny else (57, 896, 4096, 8192)), "norms")
    tell(here, activations(kernels, random, (57,) if tiny else (57, 4864, 14336)), "activations")
    heads = ((4, 2, 16),) if tiny else ((32, 8, 128), (14, 2, 64), (8, 4, 256), (6, 3, 14))
    tell(here, ropes(kernels, random, heads), "rope_and_cache")
    tell(here, latent_ropes(kernels, random, (4, 24, 16) if tiny else (16, 512, 64)), "rope_and_latent")
    sizes = (2, 2, 10, 11) if tiny else (16, 2, 128, 128)
    tell(here, delta_rules(kernels, random, sizes, here.sized(50, 5)), "gated_delta_rule")
    shapes = ((57, 97),) if tiny else ((57, 97), (6144, 4096), (4096, 14336), (896, 4864))
    tell(here, products(choose(batch_invariant=True), random, shapes), "--batch-invariant product")
    if linear_fp8.is_supported(device):
        tell(here, products_fp8(kernels, random, shapes), "fp8 product")
    else:
        here.report.check("fp8 product", tiny, "torch has none here")
    tell(here, products_packed(kernels, random, shapes[: 1 if tiny else 3]), "weights in groups")
    mixed = ((5, 6, 2, 32, 24),) if tiny else ((1, 32, 8, 2048, 768), (64, 32, 8, 2048, 768), (700, 8, 2, 1024, 3584))
    tell(here, mixtures(kernels, random, mixed), "experts")
    layers = ((83, (70, 7, 13), 5),) if tiny else ((4096, (4096, 1024, 1024), 16), (14336, (4096,), 128))
    tell(here, adapters(kernels, random, layers, (1, 20) if tiny else (1, 64, 300, 2000)), "adapters")
    tell(here, drawing(sampling, random, here.sized(64, 4), columns), "sampling")
    tell(here, log_probabilities(sampling, random, here.sized(64, 3), columns), "log-softmax")
    tell(here, penalties(sampling, random, columns), "bans")


def interpreted() -> str:
    """Prepare Triton's interpreter. Returns why it cannot be used, if so."""
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")
    try:
        from triton.runtime import interpreter

        interpreter._convert_float = triton_rounding.convert  # rounds as a GPU does
        found = choose(batch_invariant=True)
        weight, x = torch.randn(5, 200), torch.randn(3, 200)
        error = difference(found.pack(weight)(x), x @ weight.t())
        return "" if error < 1e-5 else f"Triton's interpreter is wrong here: {error:.1e}"
    except Exception as error:
        return f"Triton's interpreter fails here: {error!r:.120}"


@torch.inference_mode()
def run(here: common.Place, check: Callable[[common.Place], None]) -> None:
    """Run the checks of a part, in Triton's interpreter in a rehearsal."""
    if here.rehearse and (reason := interpreted()):
        here.report.not_run("kernels", reason)
        return
    check(here)


if __name__ == "__main__":
    run(common.place("kernels"), check)
