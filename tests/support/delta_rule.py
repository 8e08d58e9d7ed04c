"""Layers of the gated delta rule with random weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from serve_llm.kernels.delta_rule import DeltaRule, DraftCounts


def make_layer(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> DeltaRule:
    """Build a layer. sizes: key heads, heads per key head, key_dim, value_dim."""
    key_heads, group, key_dim, value_dim = sizes
    heads = key_heads * group
    generator = torch.Generator().manual_seed(3)
    channels = 2 * key_heads * key_dim + heads * value_dim
    return DeltaRule(
        conv=(torch.randn(4, channels, generator=generator) * 0.5).to(dtype),
        decay=torch.randn(heads, generator=generator),
        decay_bias=torch.randn(heads, generator=generator),
        key_heads=torch.arange(heads) // group,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def make_inputs(layer: DeltaRule, tokens: int, dtype: torch.dtype, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Return qkv, as rows of a wider tensor, which a joint projection yields, and gates."""
    generator = torch.Generator().manual_seed(seed)
    channels = layer.conv.shape[1]
    qkv = torch.randn(tokens, channels + 7, generator=generator).to(dtype)[:, :channels]
    return qkv, torch.randn(tokens, 2 * layer.heads, generator=generator).to(dtype) * 3


def make_cache(layer: DeltaRule, slots: int, drafts: int = 0) -> Tensor:
    """Return a cache whose numbers no kernel may use, with room for this many drafts."""
    cache = torch.full((slots, layer.state_size + drafts * (layer.conv.shape[1] + 2 * layer.heads)), torch.nan)
    layer.split_cache(cache)[1][..., layer.value_dim :] = 0.0  # what no kernel needs to read or write
    return cache


class DraftedSequence:
    """A sequence whose tokens come in steps with drafts, of which some are right."""

    def __init__(self, layer: DeltaRule, dtype: torch.dtype, slot: int, seed: int) -> None:
        self.slot = slot
        self.num_computed = 0
        self.qkv, self.gates = make_inputs(layer, 40, dtype, seed)
        self._wrong_qkv, self._wrong_gates = make_inputs(layer, 40, dtype, seed + 100)
        self._num_right = 0  # drafts of the last step that turned out right

    def plan(self, rng: random.Random, most: int) -> tuple[int, int, int]:
        """Return the numbers of accepted drafts, of tokens and of drafts of the next step, and accept the drafts."""
        accepted = rng.randrange(self._num_right + 1)  # a grammar may end a text before the last right one
        self.num_computed += accepted
        self._num_right = rng.randrange(most + 1)
        num_drafts = rng.randrange(self._num_right, most + 1)
        return accepted, rng.choice([1, 1, 1, 4]), num_drafts

    def take(self, count: int, num_drafts: int) -> tuple[Tensor, Tensor]:
        """Return qkv and gates of a step."""
        end = self.num_computed + count + num_drafts
        qkv, gates = self.qkv[self.num_computed : end].clone(), self.gates[self.num_computed : end].clone()
        wrong = slice(count + self._num_right, None)
        qkv[wrong] = self._wrong_qkv[: len(qkv[wrong])]
        gates[wrong] = self._wrong_gates[: len(gates[wrong])]
        return qkv, gates

    def check(self, found: Tensor, expected: Tensor, count: int) -> None:
        """Compare the outputs of a step's right tokens with those of a computation without drafts."""
        num_right = count + self._num_right
        assert torch.equal(found[:num_right], expected[self.num_computed : self.num_computed + num_right])
        self.num_computed += count


def check_drafts(run: Callable[..., Tensor], layer: DeltaRule, dtype: torch.dtype, num_steps: int = 9) -> None:
    """Check that outputs and states are those of a computation without drafts."""
    rng = random.Random(7)
    most = 4
    sequences = [DraftedSequence(layer, dtype, slot, seed) for seed, slot in enumerate((4, 1, 2))]
    wholes = [run(one.qkv, one.gates, layer, make_cache(layer, 1), [0], [0, 40], [40]) for one in sequences]
    cache = make_cache(layer, 6, most)
    num_accepted = 0
    for _ in range(num_steps):
        chosen = [one for one in sequences if rng.random() < 0.8 and one.num_computed < 25] or sequences[-1:]
        rng.shuffle(chosen)
        accepted, counts, new = zip(*(one.plan(rng, most) for one in chosen), strict=True)
        steps = [one.take(count, drafts) for one, count, drafts in zip(chosen, counts, new, strict=True)]
        starts = [0, *accumulate(len(qkv) for qkv, _ in steps)]
        qkv, gates = (torch.cat(parts) for parts in zip(*steps, strict=True))
        contexts = [one.num_computed + end - first for one, (first, end) in zip(chosen, pairwise(starts), strict=True)]
        slots = [one.slot for one in chosen]
        found = run(qkv, gates, layer, cache, slots, starts, contexts, drafts=DraftCounts(accepted, new))
        for one, (first, end), count in zip(chosen, pairwise(starts), counts, strict=True):
            one.check(found[first:end], wholes[sequences.index(one)], count)
            before = make_cache(layer, 1)
            known = one.num_computed
            run(one.qkv[:known], one.gates[:known], layer, before, [0], [0, known], [known])
            assert torch.equal(cache[one.slot, : layer.state_size], before[0])
        num_accepted += sum(accepted)
    assert num_accepted > 3
    assert cache[[0, 3, 5], : layer.state_size - 1].isnan().any(1).all()  # unused slots
