"""Tensors of a device that pass through the host's memory."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from serve_llm.engine.parallel.staged import StagedGroup, StagedLink
from support.ranks import Meeting, MemoryGroup, run_together


def test_a_group_is_that_of_the_host() -> None:
    meeting = Meeting(3)

    def work(rank: int) -> tuple[Tensor, list[Tensor]]:
        group = StagedGroup(MemoryGroup(meeting, rank))
        assert (group.rank, group.size) == (rank, 3)
        x = torch.tensor([[0.1, 10.0**rank]], dtype=torch.bfloat16)
        return group.all_reduce(x.clone()), group.all_gather(x)

    results = run_together(3, work, meeting.abort)
    for total, parts in results:
        assert torch.equal(total, sum(part.float() for part in parts).bfloat16())  # type: ignore[union-attr]
        assert [part[0, 1].item() for part in parts] == [1.0, 10.0, 100.0]


class Pipe:
    """A link of the host."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()

    def send(self, x: Tensor) -> None:
        assert x.device.type == "cpu"
        self.sent.append(x.clone())

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        assert self.sent[0].shape == shape
        return self.sent.popleft()


def test_what_a_link_receives_is_on_the_device() -> None:
    pipe = Pipe()
    sender, receiver = StagedLink(pipe, torch.device("cpu")), StagedLink(pipe, torch.device("meta"))
    for number in range(3):
        x = torch.full((2, 5), number, dtype=torch.bfloat16)
        sender.send(x)
        x.fill_(-1)  # the sender's again
    assert torch.equal(sender.receive((2, 5)), torch.zeros(2, 5, dtype=torch.bfloat16))
    found = receiver.receive((2, 5))
    assert (found.device.type, found.shape, found.dtype) == ("meta", (2, 5), torch.bfloat16)
