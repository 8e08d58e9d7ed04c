"""Findings derived from the measurements; each line names hosts, cause and remedy."""

from __future__ import annotations

import msgspec
import pytest

from serve_llm.cli.check.collective import AllReduceResult
from serve_llm.cli.check.findings import Results, find_problems
from serve_llm.cli.check.host import HostReport
from serve_llm.cli.check.invariance import InvarianceReport
from serve_llm.cli.check.probe import LinkSpeed, Reachability
from serve_llm.cli.check.table import render
from serve_llm.common.hosts import Fingerprint


def report(rank: int, **changes: object) -> HostReport:
    name = f"host{rank}"
    plain = HostReport(
        rank=rank,
        name=name,
        address=f"10.0.0.{rank + 1}",
        interface="eth0",
        mtu=1500,
        probe_port=4000 + rank,
        shm_bytes=1 << 30,
        open_files=65536,
        locked_memory=1 << 16,
        cores=8,
        gpus=0,
        infiniband=False,
        fingerprint=Fingerprint(host=name, serve_llm="1", python="3.11", torch="2"),
    )
    return msgspec.structs.replace(plain, **changes)


def healthy(number: int = 2) -> Results:
    pairs = [(a, b) for a in range(number) for b in range(number) if a != b]
    return Results(
        hosts={rank: report(rank) for rank in range(number)},
        reaches=[Reachability(source=a, target=b) for a, b in pairs],
        heard={rank: set(range(number)) - {rank} for rank in range(number)},
        speeds=[LinkSpeed(source=a, target=b, latency_us=50, bandwidth=1e9) for a, b in pairs],
        clocks=dict.fromkeys(range(1, number), 0.001),
        collectives={rank: [AllReduceResult(backend="gloo", small_us=90, large=1e8)] for rank in range(number)},
    )


def test_gpus_that_cannot_be_used_are_a_problem() -> None:
    results = Results(hosts={0: report(0, gpus=8, gpu_problem="the driver is too old")})
    assert only_problem(results) == "node 0 (host0): its GPUs cannot be used: the driver is too old"


def broken(failures: dict[tuple[int, int], str], heard: dict[int, set[int]]) -> Results:
    results = healthy()
    results.reaches = [Reachability(source=a, target=b, failure=failures.get((a, b), "")) for a, b in ((0, 1), (1, 0))]
    results.heard = heard
    return results


def only_problem(results: Results) -> str:
    (problem,) = find_problems(results).problems
    assert f"PROBLEM: {problem}" in render(results, find_problems(results))
    return problem


@pytest.mark.parametrize("number", [1, 2, 5])
def test_nothing_wrong(number: int) -> None:
    results = healthy(number)
    assert find_problems(results).problems == find_problems(results).notes == []
    assert "No problem found" in render(results, find_problems(results))


@pytest.mark.parametrize(
    ("heard", "expected"),
    [
        ({0: {1}, 1: set()}, "node 0 (host0) -> node 1 (host1): packets in this direction are lost"),
        ({0: set(), 1: {0}}, "node 1 (host1) -> node 0 (host0): packets in this direction are lost"),
        ({0: {1}, 1: {0}}, "node 0 (host0) <-> node 1 (host1): TCP is blocked in both directions while UDP passes"),
        ({0: set(), 1: set()}, "no packets pass between 10.0.0.1 (eth0) and 10.0.0.2 (eth0) in either direction"),
    ],
)
def test_no_connection_in_either_direction(heard: dict[int, set[int]], expected: str) -> None:
    assert expected in only_problem(broken({(0, 1): "timeout", (1, 0): "timeout"}, heard))


def test_no_connection_in_one_direction() -> None:
    closed = only_problem(broken({(1, 0): "timeout"}, {0: {1}, 1: {0}}))
    assert closed.startswith("node 1 (host1) -> node 0 (host0): no connection to 10.0.0.1 port 4000 (timeout)")
    assert "the firewall of node 0 closes the port" in closed
    unknown = only_problem(broken({(0, 1): "Network is unreachable"}, {0: {1}, 1: set()}))
    assert "no route to 10.0.0.2 (eth0): Network is unreachable" in unknown and "--host-ip" in unknown


@pytest.mark.parametrize(("passing", "words"), [(1400, "up to 1400 bytes pass"), (0, "none of the usual sizes passes")])
def test_large_packets_lost(passing: int, words: str) -> None:
    results = healthy()
    results.reaches = [Reachability(source=a, target=1 - a, large_lost="there", path_mtu=passing) for a in (0, 1)]
    problem = only_problem(results)  # once per pair
    assert words in problem and "1500" in problem and "node 0 (host0) <-> node 1 (host1)" in problem


def test_limits_of_a_host() -> None:
    results = healthy(1)
    results.hosts[0] = report(0, shm_bytes=64 << 20, open_files=1024)
    assert "/dev/shm holds 64 MiB" in only_problem(results)
    (note,) = find_problems(results).notes
    assert "1024 open files" in note
    results.hosts[0] = report(0, gpus=8, infiniband=True)
    assert "locked memory is limited to 64 KiB" in only_problem(results)
    results.hosts[0] = report(0, gpus=8, infiniband=True, locked_memory=-1)
    assert not find_problems(results).problems


def test_linear_layers_that_depend_on_the_batch_are_a_problem() -> None:
    results = healthy()
    results.hosts[0] = report(
        0, invariance=InvarianceReport(num_shapes=5, variant="amx", slow=["7 x 8"], differing=["8 x 9"])
    )
    findings = find_problems(results)
    assert any("node 0" in line and "batch in linear layers of 8 x 9" in line for line in findings.problems)
    assert any("linear layers of 7 x 8 take a slower path" in line for line in findings.notes)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (
            InvarianceReport(num_shapes=5, variant="avx2"),
            "5 shapes of linear layer checked (avx2): no result depends on the batch",
        ),
        (
            InvarianceReport(error="out of memory"),
            "batch invariance of the model's linear layers was not checked: out of memory",
        ),
    ],
)
def test_linear_layers_that_are_invariant_or_unchecked_are_a_note(found: InvarianceReport, line: str) -> None:
    results = healthy()
    results.hosts[1] = report(1, invariance=found)
    findings = find_problems(results)
    assert not findings.problems and findings.notes == [f"node 1 (host1): {line}"]


def test_clock_is_a_note() -> None:
    results = healthy()
    results.clocks[1] = -30.0
    (note,) = find_problems(results).notes
    assert "node 1 (host1): its clock is 30.0 s behind node 0's" in note and not find_problems(results).problems


def test_versions_and_models() -> None:
    results = healthy(3)
    first = results.hosts[0].fingerprint
    results.hosts[1] = report(1, model_error="cannot read config.json")
    results.hosts[2] = report(2, fingerprint=msgspec.structs.replace(first, torch="3", python="3.12"))
    missing, different = find_problems(results).problems
    assert missing.startswith("node 1 (host1): cannot read config.json")
    assert different.startswith(
        "node 2 (host2) has python 3.12, node 0 (host0) has 3.11; node 2 (host2) has torch 3, node 0 (host0) has 2; "
    )


def test_slow_pair_is_a_note() -> None:
    results = healthy(3)
    results.speeds[4] = LinkSpeed(source=2, target=0, bandwidth=1e8)
    (note,) = find_problems(results).notes
    assert note.startswith("node 2 (host2) -> node 0 (host0): 95 MiB/s, others have 954 MiB/s")
    results.speeds[4] = LinkSpeed(source=0, target=2, failure="timeout")
    assert "node 0 (host0) -> node 2 (host2): the connection broke" in only_problem(results)


def test_collectives() -> None:
    results = healthy()
    results.collectives[1] = [AllReduceResult(backend="gloo", error="3 of 7 sums are wrong")]
    assert only_problem(results) == "gloo all-reduce over all hosts fails: node 1: 3 of 7 sums are wrong"
    assert "gloo all-reduce: FAILED" in render(results, find_problems(results))
    results = healthy()
    for found in results.collectives.values():
        found.append(AllReduceResult(backend="nccl", small_us=20, large=1e10, transport="NET/Socket"))
    (note,) = find_problems(results).notes
    assert note.startswith("NCCL goes over NET/Socket: TCP: ")
    results.collectives[0][1] = AllReduceResult(backend="nccl", small_us=20, large=1e10, local_transport="SHM")
    assert any(
        note.startswith("NCCL goes over SHM: through the host's memory") for note in find_problems(results).notes
    )
    results.collectives[0][1] = results.collectives[1][1]
    assert "nccl all-reduce over NET/Socket: exact; 16 KiB in 20 us" in render(results, find_problems(results))
