"""Find NCCL's transports, between and within hosts, in its log (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH).

The patterns match the lines of NCCL 2.18 to 2.31, src/transport/net.cc. Imports no torch.
"""

from __future__ import annotations

import re

MEANINGS = {
    "NET/IB/GDRDMA": "InfiniBand or RoCE, straight between the memories of the GPUs: the fastest transport",
    "NET/IB": "InfiniBand or RoCE, staged through the hosts' memory: load nvidia-peermem (or use dma-buf), and put GPU "
    "and network card under one PCIe switch; NCCL_NET_GDR_LEVEL says how far apart they may be",
    "NET/Socket": "TCP: good enough for pipeline parallelism, slow for tensor parallelism. If there is "
    "InfiniBand, look for `NET/IB : No device found`: in a container it needs /dev/infiniband and IPC_LOCK, and "
    "NCCL_IB_DISABLE not 1",
}

# ... Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0(3)/GDRDMA(PCI)/Shared
_CONNECTION = re.compile(r"Channel \d+(?:/\d+)? ?: .*? via (NET/[^/\n]+)/\d+(?:\(\d+\))?((?:/[^/\s]+)*)")
LOCAL_MEANINGS = {
    "P2P": "straight between the memories of the GPUs, by NVLink or PCIe",
    "SHM": "through the host's memory, as some GPUs have no access to each other's, which is slow: look at "
    "nvidia-smi topo -p2p r, and at IOMMU and ACS in the firmware",
}

# ... Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM        ... via SHM/direct/direct
_LOCAL_CONNECTION = re.compile(r"Channel \d+(?:/\d+)? ?: .*? via (P2P|SHM)/")
_NETWORK = re.compile(r"Using network (\S.*\S)")


def find_transport(log: str) -> str:
    """NET/IB/GDRDMA, NET/IB, NET/Socket, or NET/<plugin>[/GDRDMA]: the slowest of all connections, which limits a ring.
    Empty if the log names none, as with one host."""
    transports = set()
    for network, rest in _CONNECTION.findall(log):
        direct = any(part.startswith("GDRDMA") for part in rest.split("/"))
        transports.add(f"{network}/GDRDMA" if direct else network)
    if not transports:
        names = _NETWORK.findall(log)
        return f"NET/{names[-1]}" if names else ""
    return min(transports, key=lambda name: (name != "NET/Socket", name.endswith("/GDRDMA"), name))


def find_local_transport(log: str) -> str:
    """P2P or SHM: the slowest of all connections inside this host; empty if there are none."""
    return max(_LOCAL_CONNECTION.findall(log), default="")


def explain_transport(name: str) -> str:
    """What the transport means, and how to get a faster one."""
    meanings = MEANINGS | LOCAL_MEANINGS
    if name in meanings:
        return meanings[name]
    direct = name.endswith("/GDRDMA")
    return "a network plugin, " + ("straight between GPUs" if direct else "staged through the hosts' memory")
