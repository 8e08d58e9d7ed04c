"""Lines in NCCL's format, with the ranks, channels and cards of an imaginary cluster."""

from __future__ import annotations

import pytest

from serve_llm.cli.check.nccl_log import MEANINGS, explain_transport, find_transport

HEAD = """\
gpu-a:411:498 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
gpu-a:411:498 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
gpu-a:411:498 [0] NCCL INFO Using network IB
"""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA"], "NET/IB/GDRDMA"),
        (["1[7] -> 8[0] [send] via NET/IB/0(3)/GDRDMA(PCI)/Shared"], "NET/IB/GDRDMA"),
        (["1[0] -> 0[0] [receive] via NET/IB/0/Shared", "0[0] -> 1[0] [send] via NET/IB/1/Shared"], "NET/IB"),
        (["1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA", "0[0] -> 1[0] [send] via NET/IB/0"], "NET/IB"),
        (["1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA", "0[0] -> 1[0] [send] via NET/Socket/0"], "NET/Socket"),
        (["0[1b000] -> 1[43000] [send] via NET/AWS Libfabric/0/GDRDMA"], "NET/AWS Libfabric/GDRDMA"),
        (["0[0] -> 1[1] via P2P/CUMEM/read", "1[1] -> 2[0] [send] via NET/Socket/1"], "NET/Socket"),
        (["0[0] -> 1[1] via SHM/direct/direct"], "NET/IB"),  # the transport over the network
    ],
)
def test_slowest_transport(lines: list[str], expected: str) -> None:
    log = HEAD + "".join(f"gpu-a:411:520 [0] NCCL INFO Channel {n:02}/0 : {line}\n" for n, line in enumerate(lines))
    assert find_transport(log) == expected


def test_older_and_empty_logs() -> None:
    line = "host:1:2 [0] NCCL INFO Channel 00 : 0[1b000] -> 1[1b000] [receive] via NET/Socket/0\n"
    assert find_transport(line) == "NET/Socket"
    assert find_transport("") == find_transport("host:1:2 [0] NCCL INFO Init COMPLETE\n") == ""
    assert find_transport(
        "h:1:2 [0] NCCL INFO NET/IB : No device found.\nh:1:2 [0] NCCL INFO Using network Socket\n"
    ) == ("NET/Socket")


def test_meanings() -> None:
    assert all(explain_transport(name) == text for name, text in MEANINGS.items())
    assert "staged" in explain_transport("NET/AWS Libfabric") and "straight" in explain_transport(
        "NET/AWS Libfabric/GDRDMA"
    )
