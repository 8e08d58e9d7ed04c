"""`python -m serve_llm.cli.container_health`: the image's health check.

It requests GET /ready at the address that the command line or the environment gave to the container's first process.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from serve_llm.cli.main import COMMANDS
from serve_llm.common.errors import ServeError
from serve_llm.common.options.sources import parse_args

COMMAND_LINE = Path("/proc/1/cmdline")
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
SECONDS = 2.0


def main() -> int:
    try:
        url = find_url(COMMAND_LINE.read_text(encoding="utf-8").split("\0")[:-1], os.environ)
        if url is not None:
            ask(url)
    except (OSError, ServeError) as error:
        print(f"not healthy: {error}", file=sys.stderr)
        return 1
    return 0


def find_url(command_line: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The URL of the server's readiness route; None if the process does not serve HTTP.

    command_line: of the container's first process; an init program may come first. Raises OptionError.
    """
    names = [os.path.basename(argument) for argument in command_line]
    if "serve-llm" not in names:
        return None  # for example a node that follows another one
    argv = list(command_line[names.index("serve-llm") + 1 :])
    if argv[:1] == ["serve"]:
        del argv[0]
    if argv and argv[0] in COMMANDS:
        return None
    options = parse_args(argv, environ)
    if options.node_rank:
        return None
    host = ANY_ADDRESS.get(options.host, options.host)
    if ":" in host:
        host = f"[{host}]"
    return f"{'https' if options.ssl_certfile else 'http'}://{host}:{options.port}/ready"


def ask(url: str) -> None:
    """Raises OSError unless the server answers that it is ready."""
    context = ssl.create_default_context()
    context.check_hostname = False  # the certificate is not for the loopback address
    context.verify_mode = ssl.CERT_NONE
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with urllib.request.build_opener(*handlers).open(url, timeout=SECONDS):
        pass


if __name__ == "__main__":
    sys.exit(main())
