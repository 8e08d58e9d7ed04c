"""`serve-llm check`: check one host, or the communication between several. Exit code 0: no problem found.

The command line starts it as a separate process, `python -P -m serve_llm.cli.check ...`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys

from serve_llm.cli.check.collective import AllReduceTask
from serve_llm.cli.check.findings import Results, find_problems
from serve_llm.cli.check.host import inspect_host
from serve_llm.cli.check.ray_nodes import CheckRayCluster
from serve_llm.cli.check.rendezvous import CheckRendezvous, cluster_secret
from serve_llm.cli.check.session import CheckedHost, Coordinator, LoadTask, Verdict, follow
from serve_llm.cli.check.table import render
from serve_llm.common import hosts
from serve_llm.common.errors import OptionError, ServeError
from serve_llm.common.options import parsers
from serve_llm.common.options.sources import OptionParser


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="serve-llm check",
        description="Find out before serving whether this host, or several hosts together, can serve. With --nnodes, "
        "start it on every host, in any order. It changes and downloads nothing.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", nargs="?", help="directory or Hugging Face id: are its files here, and the same everywhere?"
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of hosts (default: 1, this one)")
    parser.add_argument(
        "--node-rank", type=int, default=0, metavar="K", help="this host's number; 0 is the master (default: 0)"
    )
    parser.add_argument(
        "--master-addr", metavar="HOST:PORT", help="address of node 0, and a free TCP and UDP port there"
    )
    parser.add_argument(
        "--ray", action="store_true", help="check all nodes of this host's Ray cluster; start it on one host only"
    )
    parser.add_argument(
        "--host-ip",
        default=os.environ.get("SERVE_LLM_HOST_IP"),
        metavar="IP",
        help="address by which the other hosts reach this one (default: that of the interface towards the master)",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="how long to wait for all hosts (default: 60)"
    )
    return parser


def main() -> int:
    try:
        verdict = check(make_parser().parse_args())
    except ServeError as error:
        sys.stderr.write(f"serve-llm check: {error}\n")
        return 2 if isinstance(error, OptionError) else 1
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(verdict.text + "\n")
    return 0 if verdict.good else 1


def check(options: argparse.Namespace) -> Verdict:
    """Raises OptionError for options that conflict or cannot work, EngineError if node 0 is lost."""
    if options.ray:
        if options.nnodes != 1 or options.node_rank or options.master_addr:
            raise OptionError("--ray finds the hosts by itself: omit --nnodes, --node-rank and --master-addr")
        return _check_ray_cluster(options)
    if options.nnodes == 1 and options.master_addr is None and options.node_rank == 0:
        return _check_this_host(options)
    return _check_nodes(options)


def _check_this_host(options: argparse.Namespace) -> Verdict:
    address = hosts.find_own_address("127.0.0.1", options.host_ip)
    results = Results(hosts={0: inspect_host(0, address, 0, options.model)})
    if results.hosts[0].gpus > 1 and not results.hosts[0].gpu_problem:
        with CheckedHost(0, address, options.model) as host:
            port = host.run(LoadTask()).store_port
            task = AllReduceTask(address=address, port=port, size=1)
            results.collectives[0] = host.run(task).collectives
    findings = find_problems(results)
    return Verdict(render(results, findings), not findings.problems)


def _check_nodes(options: argparse.Namespace) -> Verdict:
    if options.nnodes < 2 or not 0 <= options.node_rank < options.nnodes:
        raise OptionError("--nnodes must be at least 2, and --node-rank one of 0 to nnodes - 1")
    if options.master_addr is None:
        raise OptionError("--nnodes needs --master-addr HOST:PORT, the same on every host")
    try:
        master, port = parsers.parse_address(options.master_addr)
    except ValueError as error:
        raise OptionError(f"--master-addr {options.master_addr}: {error}") from None
    address = hosts.find_own_address(master, options.host_ip)
    secret = cluster_secret()
    if options.node_rank:
        with CheckedHost(options.node_rank, address, options.model) as host:
            return follow(host, master, port, options.nnodes, options.timeout, secret)
    with (
        CheckRendezvous(address, port, options.nnodes, options.timeout, secret) as rendezvous,
        CheckedHost(0, address, options.model) as host,
    ):
        return Coordinator(host, rendezvous, rendezvous.wait()).run()


def _check_ray_cluster(options: argparse.Namespace) -> Verdict:
    secret = secrets.token_hex()
    with (
        CheckRayCluster() as cluster,
        CheckRendezvous(cluster.address, 0, cluster.size, options.timeout, secret) as rendezvous,
    ):
        cluster.start_nodes(rendezvous.port, options.model, options.timeout, secret)
        with CheckedHost(0, cluster.address, options.model) as host:
            absent = {rank: cluster.explain_absence(rank, options.timeout) for rank in rendezvous.wait()}
            return Coordinator(host, rendezvous, absent).run()


if __name__ == "__main__":
    sys.exit(main())
