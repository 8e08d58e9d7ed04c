"""`serve-llm check`: preflight of one host, or of the communication between several. Exit code 0: all is well.

Started by the server's command line as `python -P -m serve_llm.engine.check ...`, because the server may not import it.
"""

from __future__ import annotations

import argparse
import os
import sys

from serve_llm.engine import values
from serve_llm.engine.check.findings import Results, judge
from serve_llm.engine.check.host import examine
from serve_llm.engine.check.join import Gathering
from serve_llm.engine.check.ray_nodes import RayGathering
from serve_llm.engine.check.session import End, Master, Node, follow
from serve_llm.engine.check.table import render
from serve_llm.engine.errors import OptionError, ServeError
from serve_llm.engine.parallel import hosts


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serve-llm check",
        description="Find out before serving whether this host, or several hosts together, can serve. With --nnodes "
        "it is started on every host, in any order. Nothing is changed or downloaded.",
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
        "--ray", action="store_true", help="all nodes of the Ray cluster of this host instead; started on one host only"
    )
    parser.add_argument(
        "--host-ip",
        default=os.environ.get("SERVE_LLM_HOST_IP"),
        metavar="IP",
        help="address by which the others reach this host (default: that of the interface towards the master)",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="limit for all hosts to be started (default: 60)"
    )
    return parser


def main() -> int:
    given = make_parser().parse_args()
    try:
        end = _check(given)
    except ServeError as error:
        sys.stderr.write(f"serve-llm check: {error}\n")
        return 2 if isinstance(error, OptionError) else 1
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(end.text + "\n")
    return 0 if end.good else 1


def _check(given: argparse.Namespace) -> End:
    if given.ray:
        if given.nnodes != 1 or given.node_rank or given.master_addr:
            raise OptionError("--ray finds the hosts by itself: leave --nnodes, --node-rank and --master-addr out")
        with RayGathering(given.model, given.timeout) as cluster, Node(0, cluster.address, given.model) as node:
            return Master(node, cluster).run()
    if given.nnodes == 1 and given.master_addr is None and given.node_rank == 0:
        results = Results(hosts={0: examine(0, hosts.own_address("127.0.0.1", given.host_ip), 0, given.model)})
        findings = judge(results)
        return End(render(results, findings), not findings.problems)
    if given.nnodes < 2 or not 0 <= given.node_rank < given.nnodes:
        raise OptionError("--nnodes must be at least 2, and --node-rank one of 0 to nnodes - 1")
    if given.master_addr is None:
        raise OptionError("--nnodes needs --master-addr HOST:PORT, the same on every host")
    try:
        master, port = values.parse_address(given.master_addr)
    except ValueError as error:
        raise OptionError(f"--master-addr {given.master_addr}: {error}") from None
    address = hosts.own_address(master, given.host_ip)
    if given.node_rank == 0:
        with Gathering(address, port, given.nnodes, given.timeout) as gathering, Node(0, address, given.model) as node:
            return Master(node, gathering).run()
    with Node(given.node_rank, address, given.model) as node:
        return follow(node, master, port, given.nnodes, given.timeout)


if __name__ == "__main__":
    sys.exit(main())
