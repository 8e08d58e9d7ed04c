"""From what the hosts found to what is wrong, why, and what to do. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations

import msgspec

from serve_llm.engine.check import nccl_log
from serve_llm.engine.check.collective import Collective
from serve_llm.engine.check.host import HostReport
from serve_llm.engine.check.probe import Reach, Speed
from serve_llm.engine.parallel import hosts

MIN_SHM_BYTES = 256 << 20
MIN_OPEN_FILES = 4096
MAX_CLOCK_SECONDS = 2.0
SLOW_SHARE = 0.5  # of the median bandwidth


class Results(msgspec.Struct, kw_only=True):
    """All that was found. Ranks index everything."""

    hosts: dict[int, HostReport]
    absent: dict[int, str] = {}  # why a node is not there, with the remedy
    reaches: list[Reach] = []
    heard: dict[int, set[int]] = {}  # by whom -> whose datagrams arrived
    speeds: list[Speed] = []
    clocks: dict[int, float] = {}  # seconds ahead of node 0
    collectives: dict[int, list[Collective]] = {}
    silent: list[str] = []  # who stopped answering, and when


class Findings(msgspec.Struct, frozen=True):
    """Lines for people. Problems make the check fail, notes do not."""

    problems: list[str]
    notes: list[str]


def judge(results: Results) -> Findings:
    """Every problem names the host or the pair, the cause and the remedy."""
    problems = [*results.absent.values(), *results.silent]
    notes: list[str] = []
    for report in results.hosts.values():
        problems += _host_problems(report)
        notes += _host_notes(report, results.clocks.get(report.rank, 0.0))
    problems += _differences(list(results.hosts.values()))
    reaches = {(reach.source, reach.target): reach for reach in results.reaches}
    for first, second in combinations(sorted(results.hosts), 2):
        if (first, second) in reaches and (second, first) in reaches:
            problems += _pair_problems(results, reaches[first, second], reaches[second, first])
    problems += [
        f"{_pair(results, speed.source, speed.target)}: the connection broke while its speed was measured "
        f"({speed.failure}); look for a bad cable, port or driver (ip -s link)"
        for speed in results.speeds
        if speed.failure
    ]
    notes += _slow_notes(results)
    problems += _collective_problems(results.collectives)
    notes += _transports(results.collectives)
    return Findings(problems, notes)


def named(report: HostReport) -> str:
    return f"node {report.rank} ({report.name})"


def _host_problems(report: HostReport) -> list[str]:
    found = []
    if report.model_error:
        found.append(
            f"{named(report)}: {report.model_error}; copy or download the model to this host (this check does not)"
        )
    if report.shm_bytes < MIN_SHM_BYTES:
        found.append(
            f"{named(report)}: /dev/shm holds {size_text(report.shm_bytes)}, ranks on one host and NCCL need at least "
            f"{size_text(MIN_SHM_BYTES)}; start the container with --ipc=host or --shm-size=8g, or mount a larger tmpfs"
        )
    if report.infiniband and report.gpus and report.locked_memory >= 0:
        found.append(
            f"{named(report)}: locked memory is limited to {size_text(report.locked_memory)}, which InfiniBand "
            "cannot work with; ulimit -l unlimited (containers: --ulimit memlock=-1 --cap-add=IPC_LOCK)"
        )
    return found


def _host_notes(report: HostReport, clock: float) -> list[str]:
    found = []
    if 0 <= report.open_files < MIN_OPEN_FILES:
        found.append(
            f"{named(report)}: {report.open_files} open files are allowed; many clients need more: ulimit -n 65536"
        )
    if abs(clock) > MAX_CLOCK_SECONDS:
        found.append(
            f"{named(report)}: its clock is {abs(clock):.1f} s {'ahead of' if clock > 0 else 'behind'} node 0's; logs "
            "will not line up: set it by NTP (chrony)"
        )
    return found


def _differences(reports: Sequence[HostReport]) -> list[str]:
    # A host without the model is named already.
    having = [report for report in reports if not report.model_error]
    found = []
    for report in having[1:]:
        if line := hosts.difference([having[0].fingerprint, report.fingerprint], [named(having[0]), named(report)]):
            found.append(f"{line}; install the same versions and copy the same model files on every host")
    return found


def _pair(results: Results, source: int, target: int) -> str:
    return f"{named(results.hosts[source])} -> {named(results.hosts[target])}"


def _pair_problems(results: Results, there: Reach, back: Reach) -> list[str]:
    if there.failure and back.failure:
        return [_no_connection(results, there, back)]
    for reach, other in ((there, back), (back, there)):
        if reach.failure:
            target = results.hosts[reach.target]
            if reach.failure not in ("timeout", "refused"):  # the system knows no way there
                return [_no_route(results, reach)]
            return [
                f"{_pair(results, reach.source, reach.target)}: no connection to {target.address} port "
                f"{target.probe_port} ({reach.failure}), while connections the other way work: the firewall of node "
                f"{reach.target} closes the port; open all TCP ports between the hosts"
            ]
        if reach.large_lost and not other.failure:
            return [_small_packets_only(results, reach)]
    return []


def _no_connection(results: Results, there: Reach, back: Reach) -> str:
    """Neither can connect: a handshake needs both directions, so only datagrams tell which one is broken."""
    pair = _pair(results, there.source, there.target).replace("->", "<->")
    arrived = there.source in results.heard.get(there.target, ()), back.source in results.heard.get(back.target, ())
    if arrived == (True, True):
        return f"{pair}: TCP is blocked in both directions while UDP passes; open all TCP ports in both firewalls"
    for good, lost in ((0, back), (1, there)):
        if arrived[good] and not arrived[1 - good]:
            return (
                f"{_pair(results, lost.source, lost.target)}: packets in this direction are lost, those in the other "
                f"arrive; look at the firewall of node {lost.target} and the routes of node {lost.source}"
            )
    addresses = " and ".join(
        f"{host.address} ({host.interface})" for host in (results.hosts[there.source], results.hosts[there.target])
    )
    return (
        f"{pair}: no packets pass between {addresses} in either direction ({there.failure}, {back.failure}); are both "
        "in one network? Choose the address of each host with --host-ip (SERVE_LLM_HOST_IP)"
    )


def _no_route(results: Results, reach: Reach) -> str:
    target = results.hosts[reach.target]
    return (
        f"{_pair(results, reach.source, reach.target)}: no way to {target.address} ({target.interface}): "
        f"{reach.failure}; is it in another network? Give node {reach.target} an address that all reach: --host-ip "
        "(SERVE_LLM_HOST_IP)"
    )


def _small_packets_only(results: Results, reach: Reach) -> str:
    source = results.hosts[reach.source]
    passing = f"packets of up to {reach.path_mtu} bytes pass" if reach.path_mtu else "none of the usual sizes passes"
    remedy = f"ip link set {source.interface} mtu {reach.path_mtu}" if reach.path_mtu else "a smaller MTU"
    return (
        f"{_pair(results, reach.source, reach.target).replace('->', '<->')}: small packets pass, large ones are "
        f"lost on the way: the interfaces send {source.mtu} bytes, {passing}; correct the MTU of the "
        f"network between them, or use {remedy} on both hosts"
    )


def slow_pairs(results: Results) -> list[Speed]:
    """Those much slower than the others, in one direction at least."""
    usual = _usual(results)
    return [
        speed for speed in results.speeds if not speed.failure and min(speed.there, speed.back) < SLOW_SHARE * usual
    ]


def _usual(results: Results) -> float:
    """The median bandwidth, in bytes per second."""
    return statistics.median(
        [rate for one in results.speeds if not one.failure for rate in (one.there, one.back)] or [0.0]
    )


def _slow_notes(results: Results) -> list[str]:
    usual, found = _usual(results), []
    for slow in slow_pairs(results):
        forward = slow.there < slow.back
        ends = (slow.source, slow.target) if forward else (slow.target, slow.source)
        found.append(
            f"{_pair(results, *ends)}: {size_text(min(slow.there, slow.back))}/s, others have {size_text(usual)}/s; "
            "look at link speed (ethtool), errors (ip -s link) and the switch"
        )
    return found


def _collective_problems(collectives: Mapping[int, Sequence[Collective]]) -> list[str]:
    """One line per backend: where one host fails, the others fail because of it."""
    failed: dict[str, list[str]] = {}
    for rank, found in sorted(collectives.items()):
        for one in found:
            if one.error:
                failed.setdefault(one.backend, []).append(f"node {rank}: {one.error}")
    return [f"{backend} all-reduce over all hosts fails: {'; '.join(lines)}" for backend, lines in failed.items()]


def _transports(collectives: Mapping[int, Sequence[Collective]]) -> list[str]:
    names = {one.transport for found in collectives.values() for one in found if one.transport}
    return [f"NCCL goes over {name}: {nccl_log.meaning(name)}" for name in sorted(names)]


def size_text(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
