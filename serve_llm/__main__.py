"""`python -m serve_llm` is the `serve-llm` command."""

from __future__ import annotations

import sys

from serve_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
