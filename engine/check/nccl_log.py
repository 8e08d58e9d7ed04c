"""Over what NCCL's packets go between hosts, read from its log (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH).

The lines are those of NCCL 2.18 to 2.31, src/transport/net.cc. Pure text; knows no torch.
"""

from __future__ import annotations

import re

MEANINGS = {
    "NET/IB/GDRDMA": "InfiniBand or RoCE, straight between the memories of the GPUs: as fast as it gets",
    "NET/IB": "InfiniBand or RoCE, staged through the hosts' memory: load nvidia-peermem (or use dma-buf), and put GPU "
    "and network card under one PCIe switch; NCCL_NET_GDR_LEVEL says how far apart they may be",
    "NET/Socket": "TCP: fit for pipeline parallelism, slow for tensor parallelism. If there is InfiniBand, look for "
    "`NET/IB : No device found`: in a container it needs /dev/infiniband and IPC_LOCK, and NCCL_IB_DISABLE not 1",
}

# ... Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0(3)/GDRDMA(PCI)/Shared
_CONNECTION = re.compile(r"Channel \d+(?:/\d+)? ?: .*? via (NET/[^/\n]+)/\d+(?:\(\d+\))?((?:/[^/\s]+)*)")
_NETWORK = re.compile(r"Using network (\S.*\S)")


def transport(log: str) -> str:
    """NET/IB/GDRDMA, NET/IB, NET/Socket, or NET/<plugin>[/GDRDMA]: the slowest that any connection uses, because a ring
    is as fast as that. Empty if the log tells nothing, as with one host."""
    found = set()
    for network, rest in _CONNECTION.findall(log):
        direct = any(part.startswith("GDRDMA") for part in rest.split("/"))
        found.add(f"{network}/GDRDMA" if direct else network)
    if not found:
        names = _NETWORK.findall(log)
        return f"NET/{names[-1]}" if names else ""
    return min(found, key=lambda name: (name != "NET/Socket", name.endswith("/GDRDMA"), name))


def meaning(name: str) -> str:
    """What a transport means, and what to do where it is not the best."""
    if name in MEANINGS:
        return MEANINGS[name]
    direct = name.endswith("/GDRDMA")
    return "a network plugin, " + ("straight between GPUs" if direct else "staged through the hosts' memory")
