"""Moves experts between the ranks of an expert-parallel group while they serve, so that none has many more rows to
compute than the others (EPLB, an expert-parallelism load balancer; DeepSeek-V3, arXiv:2412.19437, section 3.4).

All ranks of a group make the same steps and know how many rows each expert had, so each computes the same placement
without asking. After every `step_interval` steps one layer is placed before each step, until all have been.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from serve_llm.common.errors import OptionError
from serve_llm.common.options.eplb import EPLBConfig
from serve_llm.engine.model.dispatch import ExpertDispatch
from serve_llm.engine.model.expert_placement import Placement, balance, count_rows
from serve_llm.kernels.cpu import library

logger = logging.getLogger(__name__)


class ExpertBalancer:
    """For the layers of one rank."""

    def __init__(self, dispatches: Sequence[ExpertDispatch], config: EPLBConfig, device: torch.device) -> None:
        """device: of the weights. All ranks of the group build it at the same time. Raises OptionError if experts
        cannot take each other's place."""
        self._step_interval = config.step_interval
        self._step = 0
        self._layers = [_MovableExperts(dispatch, device) for dispatch in dispatches]
        self._waiting: deque[_MovableExperts] = deque()  # to be placed, one before each step
        self._num_moved = 0

    def begin_step(self) -> None:
        """Call before each step, also before those without tokens."""
        self._step += 1
        if self._step % self._step_interval == 0 and not self._waiting:
            self._waiting.extend(self._layers)
        if not self._waiting:
            return
        self._num_moved += self._waiting.popleft().rebalance()
        if self._num_moved and not self._waiting:
            logger.info("Experts of %d slots were moved before step %d", self._num_moved, self._step)
            self._num_moved = 0


class _MovableExperts:
    """The experts of one layer."""

    def __init__(self, dispatch: ExpertDispatch, device: torch.device) -> None:
        """Arguments and errors as of `ExpertBalancer`."""
        self._dispatch = dispatch
        self._device = device
        dispatch.num_rows = torch.zeros(len(dispatch.span), dtype=torch.int64)
        self._slots = [
            dispatch.experts.list_tensors(slot) for slot in range(len(dispatch.placement[dispatch.group.rank]))
        ]
        forms = {_describe_layout(tensors) for tensors in self._slots}
        own = torch.tensor([0, 0])
        if self._slots:
            layout = hashlib.sha256(repr(sorted(forms)).encode()).digest()
            own = torch.tensor([sum(tensor.nbytes for tensor in self._slots[0]), int.from_bytes(layout[:7], "big")])
        gathered = [tuple(one.tolist()) for one in dispatch.group.all_gather(own.to(device))]
        known = {one for one in gathered if any(one)}
        if len(forms) > 1 or len(known) > 1:
            raise OptionError(
                "--enable-eplb: the experts of a layer are not held in the same form on all ranks, which depends on "
                "the checkpoint's quantisation and on the processor; omit it"
            )
        self._num_bytes = max(size for size, _ in gathered)  # bytes that each expert takes

    def rebalance(self) -> int:
        """Place the experts by their rows since the last call. Returns how many slots have another expert now."""
        dispatch = self._dispatch
        assert dispatch.num_rows is not None
        rows = dispatch.num_rows.tolist()
        dispatch.num_rows.zero_()
        before = dispatch.placement
        after = balance(before, rows, dispatch.span.start)
        if after == before:
            return 0
        loads = [count_rows(placement, rows, dispatch.span.start) for placement in (before, after)]
        logger.debug("Rows of each rank: %s, after moving experts %s", *loads)
        moves = _plan_moves(before, after)
        self._move(moves)
        dispatch.place(after)
        return sum(len(pairs) for line in moves for pairs in line)

    def _move(self, moves: Sequence[Sequence[Sequence[tuple[int, int]]]]) -> None:
        """Copy weights from the ranks that hold them to the slots that need them. moves: as of `_plan_moves`."""
        group = self._dispatch.group
        sent = [self._read(source) for pairs in moves[group.rank] for source, _ in pairs]
        payload = (
            torch.stack(sent) if sent else torch.empty((0, self._num_bytes), dtype=torch.uint8, device=self._device)
        )
        received = group.all_to_all(payload, [[len(pairs) for pairs in line] for line in moves])
        slots = [slot for line in moves for _, slot in line[group.rank]]
        for slot, data in zip(slots, received, strict=True):
            start = 0
            for tensor in self._slots[slot]:
                tensor.view(-1).view(torch.uint8).copy_(data[start : start + tensor.nbytes])
                start += tensor.nbytes

    def _read(self, slot: int) -> Tensor:
        """(bytes of an expert,) uint8."""
        return torch.cat([tensor.view(-1).view(torch.uint8) for tensor in self._slots[slot]])


def _plan_moves(before: Placement, after: Placement) -> list[list[list[tuple[int, int]]]]:
    """By sender and receiver: the slots to read and to write. A rank takes what it has itself from itself."""
    moves: list[list[list[tuple[int, int]]]] = [[[] for _ in before] for _ in before]
    for receiver, (old, new) in enumerate(zip(before, after, strict=True)):
        for slot, expert in enumerate(new):
            if old[slot] == expert:
                continue
            holders = [rank for rank, slots in enumerate(before) if expert in slots]
            sender = receiver if receiver in holders else holders[receiver % len(holders)]
            moves[sender][receiver].append((before[sender].index(expert), slot))
    return moves


def _describe_layout(tensors: Sequence[Tensor]) -> str:
    """Equal for experts whose weights can take each other's place. Raises OptionError for weights that cannot be
    moved."""
    on_cpu = any(tensor.device.type == "cpu" for tensor in tensors)
    variant = library.find_variant() if on_cpu else None  # which decides the order of packed weights
    if on_cpu and variant is None:
        raise OptionError("--enable-eplb needs the compiled kernels on CPUs: install serve-llm again, or omit it")
    return f"{variant} {[(list(tensor.shape), str(tensor.dtype)) for tensor in tensors]}"
