"""`serve-llm front-end SERVER`: answer clients on this host for a server on another host."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from serve_llm.common.errors import OptionError
from serve_llm.common.logs import configure, hold_records
from serve_llm.common.open_files import raise_limit
from serve_llm.common.options.schema import OPTION_FIELDS, Options
from serve_llm.common.options.sources import build_options, collect_given, make_parser, read_command_line

_NAMES = (
    *("front_ends", "host", "port", "ssl_keyfile", "ssl_certfile"),
    *("cluster_secret", "download_dir", "log_level", "log_format"),
)
FRONT_END_FIELDS = [option for option in OPTION_FIELDS if option.name in _NAMES]
DESCRIPTION = (
    "Answer clients on this host for a server elsewhere that was started with --front-end-addr. Requests are parsed "
    "and tokenized here, and tokens become text; the server keeps the engines, the queue and everything stored. Needs "
    "the model's tokenizer, no weights and no GPU."
)


def create_parser() -> argparse.ArgumentParser:
    parser = make_parser("serve-llm front-end", DESCRIPTION, FRONT_END_FIELDS)
    parser.usage = "serve-llm front-end HOST:PORT [options]"
    parser.add_argument("server", metavar="HOST:PORT", help="the server's --front-end-addr")
    parser.add_argument("--model", help="the checkpoint on this host (default: as the server names it)")
    return parser


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code. Raises ServeError if the options are wrong or the server refuses this host."""
    with hold_records(argv, environ):
        options = read_options(argv, environ)
    configure(options.log_level, "front ends", options.log_format)
    raise_limit()

    import uvloop  # imported late, so that --help answers at once

    from serve_llm.server.front_ends.joined_host import FrontEndHostProgram

    async def run() -> int:
        return await FrontEndHostProgram(options).run()

    return uvloop.run(run())


def read_options(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The server's options, of which only this command's matter. Raises OptionError."""
    flags = read_command_line(create_parser(), argv)
    flags["front_end_addr"] = flags.pop("server")
    given = collect_given(flags, environ)
    if "cluster_secret" not in given:
        raise OptionError("--cluster-secret (SERVE_LLM_CLUSTER_SECRET) is missing: give that of the server")
    return build_options(given, needs_model=False)
