"""`serve-llm front-end SERVER`: answer clients on this host for a server on another one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from serve_llm.common.errors import OptionError
from serve_llm.common.options import parsers
from serve_llm.common.options.sources import OptionParser

DESCRIPTION = (
    "Answer clients on this host for a server elsewhere that was started with --front-end-addr. Requests are parsed "
    "and tokenized here, and tokens become text; the server keeps the engines, the queue and everything stored. Needs "
    "the model's tokenizer, no weights and no GPU."
)


def create_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="serve-llm front-end", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("server", metavar="HOST:PORT", help="the server's --front-end-addr")
    parser.add_argument(
        "--front-ends", type=int, default=1, metavar="N", help="processes that answer clients (default: 1)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free one (default: 8000)")
    parser.add_argument(
        "--model", metavar="MODEL", help="the checkpoint on this host (default: as the server names it)"
    )
    parser.add_argument("--download-dir", metavar="DIR", help="directory of Hugging Face downloads")
    parser.add_argument("--ssl-keyfile", metavar="FILE", help="file with the private key (PEM): serve HTTPS")
    parser.add_argument("--ssl-certfile", metavar="FILE", help="file with the certificate and its chain (PEM)")
    parser.add_argument(
        "--cluster-secret",
        metavar="TEXT",
        help="that of the server (default: SERVE_LLM_CLUSTER_SECRET, where others on this host cannot see it)",
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code. Raises ServeError if the options are wrong or the server refuses this host."""
    given = create_parser().parse_args(list(argv))
    secret = given.cluster_secret or environ.get("SERVE_LLM_CLUSTER_SECRET")
    if not secret:
        raise OptionError("--cluster-secret (SERVE_LLM_CLUSTER_SECRET) is missing: give that of the server")
    try:
        parsers.parse_address(given.server)
    except ValueError as error:
        raise OptionError(f"{given.server}: {error}") from None
    if not 1 <= given.front_ends <= 64:
        raise OptionError(f"--front-ends: expected a number between 1 and 64, not {given.front_ends}")
    if (given.ssl_keyfile is None) != (given.ssl_certfile is None):
        raise OptionError("--ssl-keyfile and --ssl-certfile must be given together")

    import uvloop  # late, so that --help answers at once

    from serve_llm.common.logs import configure
    from serve_llm.server.front_ends.joined_host import FrontEndHostOptions, FrontEndHostProgram

    configure(given.log_level, "front ends")
    options = FrontEndHostOptions(
        server=given.server,
        num_front_ends=given.front_ends,
        host=given.host,
        port=given.port,
        cluster_secret=secret,
        model=given.model,
        download_dir=given.download_dir,
        ssl_keyfile=given.ssl_keyfile,
        ssl_certfile=given.ssl_certfile,
    )

    async def run() -> int:
        return await FrontEndHostProgram(options).run()

    return uvloop.run(run())
