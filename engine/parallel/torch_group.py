"""Groups and links between processes, on one host or several, over torch.distributed: gloo on CPUs, NCCL on GPUs.

    store = host_store(address, port)            on the host of rank 0
    store = join_store(master, port, seconds)    everywhere else, started in any order
    gather(store, "hosts", rank, size, "...")    who is there; names who has not arrived
    TorchGroup(store, "tensor 0", place, size, address, timeout)   by the members of the group alone

Each group is a process group object of its own: there is no default group and no init_process_group. It listens on the
address it is given, so that neither GLOO_SOCKET_IFNAME nor /etc/hosts decides which network is used.

A trap, measured: when one rank fails while a group is built (a wrong address, a cut link), the others hang in torch for
five times the timeout. Whoever starts the ranks ends them all at the first that fails.

Knows nothing of models and of what the ranks are for.
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
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # where mypy finds what torch.distributed exports

from serve_llm.engine.errors import EngineError, OptionError, PeerLost
from serve_llm.engine.parallel.comm import Group

SENDS_IN_FLIGHT = 2  # per link: one on its way while the next is computed
_POLL_SECONDS = 0.01


def host_store(address: str, port: int = 0, *, seconds: float = 60.0) -> TCPStore:
    """The key-value store where all ranks meet, in this process; `store.port` says where. Whoever reaches it may write:
    it listens on the address only. seconds: limit of one request. Raises OptionError if it cannot listen there."""
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


def join_store(address: str, port: int, seconds: float = 60.0) -> TCPStore:
    """The same store from another process, which may have started first. seconds: limit for the master to appear, and
    of each request later. Raises EngineError if it does not."""
    deadline = time.monotonic() + seconds
    while True:  # by hand, because torch prints a page of C++ frames for each attempt
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


def gather(
    store: Store, key: str, rank: int, size: int, value: str = "", seconds: float = 60.0, who: str = "rank"
) -> list[str]:
    """Every rank's value in rank order, once all have called this with the same key; a key is used once.

    Raises EngineError naming those who have not arrived after the seconds, as `who` 1, 3."""
    deadline = time.monotonic() + seconds
    try:
        store.set(f"{key}/{rank}", value)
        missing = list(range(size))
        while missing := [other for other in missing if not store.check([f"{key}/{other}"])]:
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                raise EngineError(f"{key}: {who} {names} of 0 to {size - 1} not there after {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        return [store.get(f"{key}/{other}").decode() for other in range(size)]
    except dist.DistError as error:
        raise PeerLost(f"{key}: the connection to the master is lost: {error}") from error


class _Backend(Protocol):
    """What torch's stubs leave out of its process groups."""

    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...
    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor]) -> dist.Work: ...
    def alltoall_base(self, found: Tensor, x: Tensor, rows_found: list[int], rows: list[int]) -> dist.Work: ...
    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work: ...


class TorchGroup:
    """A `comm.Group`, and the links between its members.

    With gloo, all_reduce keeps the promise of `Group`: values are gathered and added in rank order (gloo's own ring
    starts each slice at another rank). With NCCL only if it is told to be `in_order`; otherwise it is NCCL's own
    all-reduce, whose order of additions depends on the size of the tensor and on the topology: the same bits on every
    rank, and less to move.
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
    ) -> None:
        """name: of the group, once per store, for messages as well. address: this host's, to listen on (gloo).
        seconds: limit for all members to arrive and for each operation. Raises EngineError."""
        self.name, self.rank, self.size = name, rank, size
        self._seconds = seconds
        # By rank. Torch does not keep the tensors, and a send whose handle goes away is cancelled without a word.
        self._sending: defaultdict[int, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        gather(store, name, rank, size, seconds=seconds)  # first, because only this names who is missing
        shared = PrefixStore(name, store)
        with self._failing("connecting"):
            self._backend = (
                _gloo(shared, rank, size, address, seconds) if backend == "gloo" else _nccl(shared, rank, size, seconds)
            )
        self._in_order = in_order or backend == "gloo"

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Group.all_reduce`, and this class for NCCL."""
        if self._in_order:
            return add_in_order(self.all_gather(x))
        with self._failing("all-reduce"):
            self._backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See `Group.all_gather`. Any dtype: bytes are moved."""
        sent = x.contiguous().view(-1).view(torch.uint8)
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        with self._failing("all-gather"):
            self._backend.allgather([parts], [sent]).wait()
        return [part.view(x.dtype).view(x.shape) for part in parts]

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """See `Exchange.all_to_all`. Any dtype: bytes are moved."""
        counts = [sent[self.rank] for sent in rows]
        sent = x.contiguous().flatten(1).view(torch.uint8)
        found = sent.new_empty((sum(counts), sent.shape[1]))
        with self._failing("all-to-all"):
            self._backend.alltoall_base(found, sent, counts, list(rows[self.rank])).wait()
        return found.view(x.dtype).view(len(found), *x.shape[1:])

    def link(self, other: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> TorchLink:
        """The link from this rank to the other, or from the other to this: the two use one direction of it."""
        return TorchLink(self, other, dtype, torch.device(device))

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """torch's errors (RuntimeError with the line of a C++ file) as PeerLost, in words that name the group."""
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(  # who is lost, and why, is seen by whoever started the ranks
                f"{self.name}: {doing} failed on rank {self.rank} of {self.size} (limit {self._seconds:g} s): {error}"
            ) from error


class TorchLink:
    """A `comm.Link` between two ranks of a group. Made by `TorchGroup.link`."""

    def __init__(self, group: TorchGroup, other: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._other, self._dtype, self._device = group, other, dtype, device
        self._sending = group._sending[other]

    def send(self, x: Tensor) -> None:
        own = x.contiguous().clone()
        with self._group._failing(f"send to rank {self._other}"):
            while len(self._sending) >= SENDS_IN_FLIGHT:
                self._sending.popleft()[0].wait()
            self._sending.append((self._group._backend.send([own], self._other, 0), own))

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        x = torch.empty(shape, dtype=self._dtype, device=self._device)
        with self._group._failing(f"receive from rank {self._other}"):
            self._group._backend.recv([x], self._other, 0).wait()
        return x


class SpanningGroup:
    """A tensor-parallel group over several hosts: sums inside each host first, then sums of hosts in host order.

    In float32 throughout and rounded once; the same bits on every rank, whatever other rows there are, but not the bits
    of a group on one host, which adds rank by rank.
    """

    def __init__(self, everyone: TorchGroup, leaders: TorchGroup | None, local: Group) -> None:
        """everyone: all ranks. local: those of this host, over its shared memory. leaders: the first rank of each host,
        in host order; None on other ranks. Built by `spanning_group`."""
        self.rank, self.size = everyone.rank, everyone.size
        self._everyone, self._leaders, self._local = everyone, leaders, local

    def all_reduce(self, x: Tensor) -> Tensor:
        partial = self._local.all_reduce(x.float())
        # The leader hands round the total by another local sum, in which the others are zero: exact.
        total = torch.zeros_like(partial) if self._leaders is None else self._leaders.all_reduce(partial)
        return self._local.all_reduce(total).to(x.dtype)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._everyone.all_gather(x)


def spanning_group(
    store: Store, name: str, rank: int, hosts: Sequence[str], local: Group, address: str, seconds: float = 60.0
) -> SpanningGroup:
    """hosts: of each rank, `hosts.host_id()`. local: this host's ranks of the group, in rank order. Called by all
    ranks. Raises EngineError."""
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    everyone = TorchGroup(store, name, rank, len(hosts), address, seconds)
    leaders = None
    if rank in firsts:
        leaders = TorchGroup(store, f"{name} leaders", firsts.index(rank), len(firsts), address, seconds)
    return SpanningGroup(everyone, leaders, local)


def add_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order given, in float32, rounded once to the parts' dtype. May overwrite the first part."""
    total = parts[0].float()  # a copy only where it is not float32 already
    for part in parts[1:]:
        total = total.add_(part)
    return total.to(parts[0].dtype)


def _gloo(store: Store, rank: int, size: int, address: str, seconds: float) -> _Backend:
    gloo: Any = dist.ProcessGroupGloo  # whose options have other names in torch's stubs
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address, lazy_init=False)]
    options._timeout = timedelta(seconds=seconds)
    return cast(_Backend, gloo(store, rank, size, options))


def _nccl(store: Store, rank: int, size: int, seconds: float) -> _Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return cast(_Backend, dist.ProcessGroupNCCL(store, rank, size, options))
