"""Groups and links of tensors on a GPU whose bytes go through the host's memory: where ranks share one card, which NCCL
does not serve."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serve_llm.engine.parallel.comm import Group, Link


@dataclass(frozen=True)
class StagedGroup:
    """A `comm.Group` over one of CPU tensors."""

    host: Group

    @property
    def rank(self) -> int:
        return self.host.rank

    @property
    def size(self) -> int:
        return self.host.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.host.all_reduce(x.cpu()).to(x.device)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [part.to(x.device) for part in self.host.all_gather(x.cpu())]


@dataclass(frozen=True)
class StagedLink:
    """A `comm.Link` over one of CPU tensors."""

    host: Link
    device: torch.device

    def send(self, x: Tensor) -> None:
        self.host.send(x.cpu())

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        return self.host.receive(shape).to(self.device)
