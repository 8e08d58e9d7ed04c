"""Process groups over torch.distributed, on one host or several: gloo on CPUs, NCCL on GPUs.

    store = create_store(address, port)                            on the host of rank 0
    store = connect_store(master, port, seconds)                   everywhere else, started in any order
    gather_values(store, "hosts", rank, size, "...")               exchange values; names the ranks that are missing
    TorchGroup(store, "tensor 0", rank, size, address, seconds)    called by the members of the group only

Each group is a separate torch process group: there is no default group and no init_process_group. It listens on the
given address, so neither GLOO_SOCKET_IFNAME nor /etc/hosts decides which network is used.

If one rank fails while a group is built (a wrong address, a broken link), the others hang in torch for five times the
timeout (measured). The engine therefore stops all ranks when the first one fails.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # mypy finds them only here

from serve_llm.common.errors import EngineError, OptionError, PeerLost
from serve_llm.engine.parallel.groups import ProcessGroup

SENDS_IN_FLIGHT = 2  # per link: one in transit while the next is computed
_POLL_SECONDS = 0.01


def create_store(address: str, port: int = 0, *, seconds: float = 60.0) -> TCPStore:
    """Host the key-value store for the rendezvous of all ranks, at `store.port`. It listens on `address` only, because
    every client may write. seconds: limit of one request. Raises OptionError if it cannot listen there."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OptionError(f"cannot listen on {address} port {port} for the other hosts: {error.strerror}") from None
    bound = int(listener.getsockname()[1])
    return TCPStore(
        address,
        bound,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listener.detach(),
    )


def connect_store(address: str, port: int, seconds: float = 60.0) -> TCPStore:
    """Connect to the store of another process, which may start later. seconds: limit for it to appear, and of each
    request. Raises EngineError if it does not appear."""
    deadline = time.monotonic() + seconds
    while True:  # not by torch, which prints a page of C++ frames for each attempt
        try:
            socket.create_connection((address, port), max(0.1, deadline - time.monotonic())).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"no answer from the master at {address} port {port} within {seconds:g} s ({error}): is it "
                    "running, and is the port open in its firewall?"
                ) from None
            time.sleep(0.05)
    try:
        return TCPStore(address, port, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    except dist.DistError as error:
        raise PeerLost(f"the connection to the master at {address} port {port} is lost: {error}") from error


def gather_values(
    store: Store, key: str, rank: int, size: int, value: str = "", seconds: float = 60.0, who: str = "rank"
) -> list[str]:
    """Exchange values. Returns every rank's value in rank order, once all have called this with the same key. Use a key
    only once.

    who: what to call a participant in messages. Raises EngineError after `seconds`, naming the missing ones."""
    deadline = time.monotonic() + seconds
    try:
        store.set(f"{key}/{rank}", value)
        missing = list(range(size))
        while missing := [other for other in missing if not store.check([f"{key}/{other}"])]:
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                raise EngineError(f"{key}: {who} {names} of 0 to {size - 1} missing after {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        return [store.get(f"{key}/{other}").decode() for other in range(size)]
    except dist.DistError as error:
        raise PeerLost(f"{key}: the connection to the master is lost: {error}") from error


class _Backend(Protocol):
    """Methods of torch's process groups that its stubs omit."""

    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...
    def _allgather_base(self, found: Tensor, x: Tensor) -> dist.Work: ...
    def alltoall_base(self, found: Tensor, x: Tensor, rows_found: list[int], rows: list[int]) -> dist.Work: ...
    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work: ...


class TorchGroup:
    """A `ProcessGroup` and `AllToAllGroup`, and the links between its members.

    With gloo, all_reduce adds in rank order as `ProcessGroup` requires: it gathers tensors and adds them (gloo's own
    ring starts each slice at another rank). NCCL does so only if `in_order`; otherwise its own all-reduce is used,
    which moves less data but adds in an order that depends on the tensor's size and the topology. All ranks get the
    same bits.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        address: str,
        seconds: float = 60.0,
        backend: str = "gloo",
        in_order: bool = False,
        device: torch.device | str = "cuda",
    ) -> None:
        """name: of the group, unique in the store. address: of this host, to listen on (gloo). seconds: limit for all
        members to arrive and for each operation. device: of NCCL's tensors. Raises EngineError."""
        self.name = name
        self.rank = rank
        self.size = size
        self._seconds = seconds
        # By rank. Keeps handles and tensors: torch keeps no tensors, and cancels a send whose handle is freed.
        self._sending: defaultdict[int, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        gather_values(store, name, rank, size, seconds=seconds)  # first, because it names missing ranks
        shared = PrefixStore(name, store)
        with self._failing("connecting"):
            self._backend = (
                _gloo(shared, rank, size, address, seconds) if backend == "gloo" else _nccl(shared, rank, size, seconds)
            )
            if backend == "nccl":  # it connects at the first operation, which would be in the middle of start-up
                self._backend.allreduce([torch.zeros(1, device=device)]).wait()
        self._in_order = in_order or backend == "gloo"

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `ProcessGroup.all_reduce`, and this class for NCCL."""
        if self._in_order:
            return sum_in_rank_order(self.all_gather(x))
        with self._failing("all-reduce"):
            self._backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See `ProcessGroup.all_gather`. Supports any dtype."""
        sent = x.contiguous().view(-1).view(torch.uint8)
        found = sent.new_empty(self.size * len(sent))
        with self._failing("all-gather"):
            self._backend._allgather_base(found, sent).wait()
        return list(found.view(x.dtype).view(self.size, *x.shape).unbind())

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """See `AllToAllGroup.all_to_all`. Supports any dtype."""
        counts = [sent[self.rank] for sent in rows]
        sent = x.contiguous().flatten(1).view(torch.uint8)
        found = sent.new_empty((sum(counts), sent.shape[1]))
        with self._failing("all-to-all"):
            self._backend.alltoall_base(found, sent, counts, list(rows[self.rank])).wait()
        return found.view(x.dtype).view(len(found), *x.shape[1:])

    def link(self, other: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> TorchLink:
        """The link between this rank and `other`, to be used in one direction. Both call this; it waits for the other.

        It sends one number, because NCCL connects two ranks at their first message, which would otherwise be in the
        first step.
        """
        link = TorchLink(self, other, dtype, torch.device(device))
        if self.rank < other:
            link.send(torch.zeros(1, dtype=dtype, device=device))
        else:
            link.receive((1,))
        return link

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """Turn torch's RuntimeError into PeerLost with a message that names the group."""
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(  # the engine determines which rank is lost, and why
                f"{self.name}: {doing} failed on rank {self.rank} of {self.size} (limit {self._seconds:g} s): {error}"
            ) from error


class TorchLink:
    """A `PipelineLink` between two ranks of a group. Built by `TorchGroup.link`."""

    def __init__(self, group: TorchGroup, other: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._other = other
        self._dtype = dtype
        self._device = device
        self._sending = group._sending[other]

    def send(self, x: Tensor) -> None:
        copy = x.contiguous().clone()
        with self._group._failing(f"send to rank {self._other}"):
            while len(self._sending) >= SENDS_IN_FLIGHT:
                self._sending.popleft()[0].wait()
            self._sending.append((self._group._backend.send([copy], self._other, 0), copy))

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        x = torch.empty(shape, dtype=self._dtype, device=self._device)
        with self._group._failing(f"receive from rank {self._other}"):
            self._group._backend.recv([x], self._other, 0).wait()
        return x


class HierarchicalGroup:
    """A tensor-parallel group over several hosts: adds inside each host first, then over hosts in host order.

    Adds in float32 and rounds once: the same bits on every rank, independent of other rows, but not the bits of a group
    on one host, which adds rank by rank.
    """

    def __init__(self, everyone: TorchGroup, leaders: TorchGroup | None, local: ProcessGroup) -> None:
        """everyone: all ranks. local: those of this host, over its shared memory. leaders: the first rank of each host,
        in host order; None on other ranks. Built by `build_hierarchical_group`."""
        self.rank = everyone.rank
        self.size = everyone.size
        self._everyone = everyone
        self._leaders = leaders
        self._local = local

    def all_reduce(self, x: Tensor) -> Tensor:
        host_sum = self._local.all_reduce(x.float())
        # The leader distributes the total by a local sum to which all other ranks contribute zeros, which is exact.
        total = torch.zeros_like(host_sum) if self._leaders is None else self._leaders.all_reduce(host_sum)
        return self._local.all_reduce(total).to(x.dtype)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._everyone.all_gather(x)


def build_hierarchical_group(
    store: Store, name: str, rank: int, hosts: Sequence[str], local: ProcessGroup, address: str, seconds: float = 60.0
) -> HierarchicalGroup:
    """Build the group. All ranks call this. hosts: host id of each rank. local: this host's ranks of the group, in rank
    order. Raises EngineError."""
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    everyone = TorchGroup(store, name, rank, len(hosts), address, seconds)
    leaders = None
    if rank in firsts:
        leaders = TorchGroup(store, f"{name} leaders", firsts.index(rank), len(firsts), address, seconds)
    return HierarchicalGroup(everyone, leaders, local)


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """Add the parts in order, in float32, and round once to their dtype. May overwrite the first part."""
    total = parts[0].float()  # copies unless it is float32
    for part in parts[1:]:
        total = total.add_(part)
    return total.to(parts[0].dtype)


def _gloo(store: Store, rank: int, size: int, address: str, seconds: float) -> _Backend:
    gloo: Any = dist.ProcessGroupGloo  # its options have other names in torch's stubs
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address, lazy_init=False)]
    options._timeout = timedelta(seconds=seconds)
    return cast(_Backend, gloo(store, rank, size, options))


def _nccl(store: Store, rank: int, size: int, seconds: float) -> _Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return cast(_Backend, dist.ProcessGroupNCCL(store, rank, size, options))
