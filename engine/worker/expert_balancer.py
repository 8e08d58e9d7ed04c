"""Moves experts between the ranks of an expert-parallel group at run time, so that all compute about as many rows
(EPLB, expert-parallelism load balancer; DeepSeek-V3, arXiv:2412.19437, section 3.4).

All ranks of a group run the same steps and know how many rows each expert had, so each computes the same placement
without communication. After every `step_interval` steps, one layer is rebalanced before each step until all are done.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from serve_llm.common.errors import OptionError
from serve_llm.common.options.eplb import EPLBConfig
from serve_llm.common.types import EPLBStats
from serve_llm.engine.model.dispatch import ExpertDispatch
from serve_llm.engine.model.expert_placement import Placement, balance, count_rows
from serve_llm.kernels.cpu import library
from serve_llm.kernels.moe import LocalExpert

logger = logging.getLogger(__name__)

Moves = list[list[list[tuple[int, int]]]]  # by sender and receiver: the slots to read and to write


class ExpertBalancer:
    """Balances the layers of one rank. Counts rows from its construction on."""

    def __init__(self, dispatches: Sequence[ExpertDispatch], config: EPLBConfig, device: torch.device) -> None:
        """device: of the weights. All ranks of the group build it at the same time. Raises OptionError if experts are
        not interchangeable."""
        self._step_interval = config.step_interval
        self._step = 0
        variant = library.find_variant() if device.type == "cpu" else None  # determines the order of packed weights
        self._layers = [_MovableExperts(dispatch, variant, device) for dispatch in dispatches]
        self._waiting: deque[_MovableExperts] = deque()  # to be rebalanced, one before each step
        self.stats: EPLBStats | None = None  # what this rank has done; replaced after each placement

    def begin_step(self) -> None:
        """Call before each step, including steps without tokens."""
        self._step += 1
        if self._step % self._step_interval == 0 and not self._waiting:
            self._waiting.extend(self._layers)
        if self._waiting:
            self._waiting.popleft().rebalance()
            self.stats = reduce(EPLBStats.add, [layer.stats for layer in self._layers])


class _Layout(NamedTuple):
    """How a rank holds the experts of a layer."""

    num_bytes: int  # bytes that each expert takes
    form: int  # a hash


NO_EXPERTS = _Layout(0, 0)
NOT_MOVABLE = _Layout(-1, 0)  # the rank's own experts are not interchangeable


class _MovableExperts:
    """The experts of one layer."""

    def __init__(self, dispatch: ExpertDispatch, variant: str | None, device: torch.device) -> None:
        """variant: of the compiled kernels on a CPU. For the other arguments and errors see `ExpertBalancer`."""
        self._dispatch = dispatch
        self._device = device
        experts = dispatch.experts.list_local_experts()
        is_compiled = all(expert.is_compiled for expert in experts)
        own = {_find_layout(expert, variant) for expert in experts} or {NO_EXPERTS}
        layout = own.pop() if is_compiled and len(own) == 1 else NOT_MOVABLE
        # Exchange before raising: otherwise the other ranks would wait for the one that raised.
        gathered = dispatch.group.all_gather(torch.tensor(layout).to(device))
        layouts = {_Layout(*numbers.tolist()) for numbers in gathered} - {NO_EXPERTS}
        if not is_compiled:
            raise OptionError("--enable-eplb needs the compiled kernels on CPUs: install serve-llm again, or omit it")
        if len(layouts) > 1 or NOT_MOVABLE in layouts:
            raise OptionError(
                "--enable-eplb: the experts of a layer are not held in the same form on all ranks, which depends on "
                "the checkpoint's quantisation, on the processor and, in bfloat16 on CPUs, on the weights (decision "
                "0064); omit it"
            )
        self._slots = [[tensor.view(-1).view(torch.uint8) for tensor in expert.tensors] for expert in experts]
        self._num_bytes = max((layout.num_bytes for layout in layouts), default=0)
        dispatch.num_rows = torch.zeros(len(dispatch.span), dtype=torch.int64)
        self.stats = EPLBStats()

    def rebalance(self) -> None:
        """Place the experts according to their rows since the last call."""
        dispatch = self._dispatch
        assert dispatch.num_rows is not None
        rows = dispatch.num_rows.tolist()
        dispatch.num_rows.zero_()
        before = dispatch.placement
        after = balance(before, rows, dispatch.span.start)
        loads = [count_rows(placement, rows, dispatch.span.start) for placement in (before, after)]
        if any(rows):
            self._count_rows(*loads)
        if after == before:
            return
        moves = _plan_moves(before, after)
        self._move(moves)
        dispatch.place(after)
        num_moved = sum(len(pairs) for line in moves for pairs in line)
        logger.debug("Rows of each rank: %s before, %s after moving %d experts", *loads, num_moved)

    def _count_rows(self, before: Sequence[float], after: Sequence[float]) -> None:
        """Note how even the rows of the ranks were, and would have been in the new placement."""
        mean = sum(before) / len(before)
        self.stats = replace(self.stats, mean_rows=mean, busiest_rows=max(before), busiest_rows_after=max(after))

    def _move(self, moves: Moves) -> None:
        """Copy weights from the ranks that hold them to the slots that need them. moves: see `_plan_moves`."""
        group = self._dispatch.group
        sources = [source for pairs in moves[group.rank] for source, _ in pairs]
        payload = torch.empty((len(sources), self._num_bytes), dtype=torch.uint8, device=self._device)
        for source, data in zip(sources, payload, strict=True):
            for part, tensor in self._split(data, source):
                part.copy_(tensor)
        received = group.all_to_all(payload, [[len(pairs) for pairs in line] for line in moves])
        targets = [target for line in moves for _, target in line[group.rank]]
        for target, data in zip(targets, received, strict=True):
            for part, tensor in self._split(data, target):
                tensor.copy_(part)
        stats = EPLBStats(num_placements=1, num_moved=len(targets), moved_bytes=received.nbytes)
        self.stats = self.stats.add(stats)

    def _split(self, data: Tensor, slot: int) -> list[tuple[Tensor, Tensor]]:
        """The parts of `data`, (bytes of an expert,) uint8, each beside the tensor of the slot to which it belongs."""
        tensors = self._slots[slot]
        return list(zip(torch.split(data, [len(tensor) for tensor in tensors]), tensors, strict=True))


def _plan_moves(before: Placement, after: Placement) -> Moves:
    """Plan what to send. Copies come from their holders in turn."""
    moves: Moves = [[[] for _ in before] for _ in before]
    for receiver, (old, new) in enumerate(zip(before, after, strict=True)):
        for slot, expert in enumerate(new):
            if old[slot] != expert:
                holders = [rank for rank, slots in enumerate(before) if expert in slots]
                sender = holders[receiver % len(holders)]
                moves[sender][receiver].append((before[sender].index(expert), slot))
    return moves


def _find_layout(expert: LocalExpert, variant: str | None) -> _Layout:
    """A signature that is equal for experts with interchangeable weights."""
    described = f"{variant} {expert.form} {[(list(tensor.shape), str(tensor.dtype)) for tensor in expert.tensors]}"
    form = int.from_bytes(hashlib.sha256(described.encode()).digest()[:7], "big")
    return _Layout(sum(tensor.nbytes for tensor in expert.tensors), form)
