"""Derive problems, causes and remedies from what the hosts measured. No input or output."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations

import msgspec

from serve_llm.cli.check.collective import AllReduceResult
from serve_llm.cli.check.host import HostReport
from serve_llm.cli.check.nccl_log import explain_transport
from serve_llm.cli.check.probe import LinkSpeed, Reachability
from serve_llm.common import hosts

MIN_SHM_BYTES = 256 << 20
MIN_OPEN_FILES = 4096
MAX_CLOCK_SECONDS = 2.0
SLOW_SHARE = 0.5  # relative to the median bandwidth


class Results(msgspec.Struct, kw_only=True):
    """All measurements. Dictionaries are by rank."""

    hosts: dict[int, HostReport]
    absent: dict[int, str] = {}  # why a node has not joined, with the remedy
    reaches: list[Reachability] = []
    heard: dict[int, set[int]] = {}  # receiving rank -> ranks whose datagrams arrived
    speeds: list[LinkSpeed] = []
    clocks: dict[int, float] = {}  # seconds ahead of node 0
    collectives: dict[int, list[AllReduceResult]] = {}
    silent: list[str] = []  # nodes that stopped answering


class Findings(msgspec.Struct, frozen=True):
    """Lines for people. Problems make the check fail, notes do not."""

    problems: list[str]
    notes: list[str]


def find_problems(results: Results) -> Findings:
    """Every problem names the host or the pair, the cause and the remedy."""
    problems = [*results.absent.values(), *results.silent]
    notes: list[str] = []
    for report in results.hosts.values():
        problems += _find_host_problems(report)
        notes += _find_host_notes(report, results.clocks.get(report.rank, 0.0))
    problems += _find_differences(list(results.hosts.values()))
    reaches = {(reach.source, reach.target): reach for reach in results.reaches}
    for first, second in combinations(sorted(results.hosts), 2):
        if (first, second) in reaches and (second, first) in reaches:
            problems += _find_pair_problems(results, reaches[first, second], reaches[second, first])
    problems += [
        f"{_describe_pair(results, speed.source, speed.target)}: the connection broke while its speed was measured "
        f"({speed.failure}); look for a bad cable, port or driver (ip -s link)"
        for speed in results.speeds
        if speed.failure
    ]
    notes += _find_slow_pairs(results)
    problems += _find_collective_problems(results.collectives)
    transports = {
        result.transport for rank_results in results.collectives.values() for result in rank_results if result.transport
    }
    transports |= {
        result.local_transport
        for rank_results in results.collectives.values()
        for result in rank_results
        if result.local_transport
    }
    notes += [f"NCCL goes over {name}: {explain_transport(name)}" for name in sorted(transports)]
    return Findings(problems, notes)


def _describe(report: HostReport) -> str:
    return f"node {report.rank} ({report.name})"


def _describe_pair(results: Results, source: int, target: int) -> str:
    return f"{_describe(results.hosts[source])} -> {_describe(results.hosts[target])}"


def _find_host_problems(report: HostReport) -> list[str]:
    problems = []
    if report.model_error:
        problems.append(f"{report.model_error}; copy or download the model to this host (this check does not)")
    if report.shm_bytes < MIN_SHM_BYTES:
        problems.append(
            f"/dev/shm holds {format_bytes(report.shm_bytes)}, ranks on one host and NCCL need at least "
            f"{format_bytes(MIN_SHM_BYTES)}; "
            "start the container with --ipc=host or --shm-size=8g, or mount a larger tmpfs"
        )
    if report.gpu_problem:
        problems.append(f"its GPUs cannot be used: {report.gpu_problem}")
    if report.infiniband and report.gpus and report.locked_memory >= 0:
        problems.append(
            f"locked memory is limited to {format_bytes(report.locked_memory)}, which InfiniBand "
            "cannot work with; ulimit -l unlimited (containers: --ulimit memlock=-1 --cap-add=IPC_LOCK)"
        )
    if report.invariance is not None and report.invariance.differing:
        problems.append(
            f"results depend on the batch in linear layers of {', '.join(report.invariance.differing)}; "
            "report it with the processor's name (lscpu)"
        )
    return [f"{_describe(report)}: {problem}" for problem in problems]


def _find_host_notes(report: HostReport, clock: float) -> list[str]:
    notes = []
    if 0 <= report.open_files < MIN_OPEN_FILES:
        notes.append(
            f"at most {report.open_files} open files are allowed; many clients need more: raise the hard limit "
            "(as root, ulimit -Hn 65536; LimitNOFILE= in systemd; --ulimit nofile= in Docker)"
        )
    if abs(clock) > MAX_CLOCK_SECONDS:
        notes.append(
            f"its clock is {abs(clock):.1f} s {'ahead of' if clock > 0 else 'behind'} node 0's; logs "
            "will not line up: set it by NTP (chrony)"
        )
    invariance = report.invariance
    if invariance is not None and invariance.error:
        notes.append(f"batch invariance of the model's linear layers was not checked: {invariance.error}")
    elif invariance is not None and invariance.slow:
        notes.append(
            f"linear layers of {', '.join(invariance.slow)} take a slower path, because their results would otherwise "
            "depend on the batch"
        )
    elif invariance is not None and not invariance.differing:
        notes.append(
            f"{invariance.num_shapes} shapes of linear layer checked ({invariance.variant}): "
            "no result depends on the batch"
        )
    return [f"{_describe(report)}: {note}" for note in notes]


def _find_differences(reports: Sequence[HostReport]) -> list[str]:
    """Hosts that differ from the first one; hosts without the model are already reported."""
    complete = [report for report in reports if not report.model_error]
    differences = []
    for report in complete[1:]:
        names = [_describe(complete[0]), _describe(report)]
        if line := hosts.difference([complete[0].fingerprint, report.fingerprint], names):
            differences.append(f"{line}; install the same versions and copy the same model files on every host")
    return differences


def _find_pair_problems(results: Results, there: Reachability, back: Reachability) -> list[str]:
    if there.failure and back.failure:
        return [_explain_no_connection(results, there, back)]
    for reach, other in ((there, back), (back, there)):
        pair = _describe_pair(results, reach.source, reach.target)
        target = results.hosts[reach.target]
        if reach.failure in ("timeout", "refused"):
            return [
                f"{pair}: no connection to {target.address} port {target.probe_port} ({reach.failure}), while "
                f"connections the other way work: the firewall of node {reach.target} closes the port; open all TCP "
                "ports between the hosts"
            ]
        if reach.failure:  # the system has no route
            return [
                f"{pair}: no route to {target.address} ({target.interface}): {reach.failure}; is it in another network?"
                f" Give node {reach.target} an address that all reach: --host-ip (SERVE_LLM_HOST_IP)"
            ]
        if reach.large_lost and not other.failure:
            return [_explain_lost_packets(results, reach)]
    return []


def _explain_no_connection(results: Results, there: Reachability, back: Reachability) -> str:
    """A TCP handshake needs both directions, so only datagrams show which one is broken."""
    pair = _describe_pair(results, there.source, there.target).replace("->", "<->")
    there_arrived = there.source in results.heard.get(there.target, ())
    back_arrived = back.source in results.heard.get(back.target, ())
    if there_arrived and back_arrived:
        return f"{pair}: TCP is blocked in both directions while UDP passes; open all TCP ports in both firewalls"
    if there_arrived or back_arrived:
        lost = back if there_arrived else there
        return (
            f"{_describe_pair(results, lost.source, lost.target)}: packets in this direction are lost, those in the "
            f"other arrive; look at the firewall of node {lost.target} and the routes of node {lost.source}"
        )
    both = (results.hosts[there.source], results.hosts[there.target])
    addresses = " and ".join(f"{report.address} ({report.interface})" for report in both)
    return (
        f"{pair}: no packets pass between {addresses} in either direction ({there.failure}, {back.failure}); are both "
        "in one network? Choose the address of each host with --host-ip (SERVE_LLM_HOST_IP)"
    )


def _explain_lost_packets(results: Results, reach: Reachability) -> str:
    source = results.hosts[reach.source]
    passing = f"packets of up to {reach.path_mtu} bytes pass" if reach.path_mtu else "none of the usual sizes passes"
    remedy = f"ip link set {source.interface} mtu {reach.path_mtu}" if reach.path_mtu else "a smaller MTU"
    return (
        f"{_describe_pair(results, reach.source, reach.target).replace('->', '<->')}: small packets pass, large ones "
        f"are lost on the way: the interfaces send {source.mtu} bytes, {passing}; correct the MTU of the network "
        f"between them, or use {remedy} on both hosts"
    )


def _find_slow_pairs(results: Results) -> list[str]:
    """Pairs that are much slower than the median."""
    speeds = [speed for speed in results.speeds if not speed.failure]
    usual = statistics.median([speed.bandwidth for speed in speeds] or [0.0])
    return [
        f"{_describe_pair(results, speed.source, speed.target)}: {format_bytes(speed.bandwidth)}/s, others have "
        f"{format_bytes(usual)}/s; look at link speed (ethtool), errors (ip -s link) and the switch"
        for speed in speeds
        if speed.bandwidth < SLOW_SHARE * usual
    ]


def _find_collective_problems(collectives: Mapping[int, Sequence[AllReduceResult]]) -> list[str]:
    """One line per backend: a failure on one host makes the others fail."""
    failures: dict[str, list[str]] = {}
    for rank, results in sorted(collectives.items()):
        for result in results:
            if result.error:
                failures.setdefault(result.backend, []).append(f"node {rank}: {result.error}")
    where = "over all hosts" if len(collectives) > 1 else "on this host"
    return [f"{backend} all-reduce {where} fails: {'; '.join(lines)}" for backend, lines in failures.items()]


def format_bytes(count: float) -> str:
    """Format a number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
