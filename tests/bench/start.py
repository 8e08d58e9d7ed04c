"""How long until something answers: --help, and from exec to /health and to the first token.

Run: python tests/bench/start.py [--rounds 5]. Prints a table of medians with the spread, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SERVE_LLM = str(Path(sys.executable).with_name("serve-llm"))
PORT = "8123"
URL = f"http://127.0.0.1:{PORT}"


def help_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([SERVE_LLM, "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def seconds_until(path: str, body: bytes | None, began: float) -> float:
    """Ask again and again until the answer is 200."""
    while True:
        try:
            with urllib.request.urlopen(URL + path, body, timeout=60):
                return time.perf_counter() - began
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.005)


def start_seconds() -> dict[str, float]:
    began = time.perf_counter()
    process = subprocess.Popen([SERVE_LLM, "demo", "--port", PORT, "--log-level", "warning"])
    try:
        health = seconds_until("/health", None, began)
        token = seconds_until("/v1/completions", b'{"prompt": "def main():", "max_tokens": 1}', began)
    finally:
        process.terminate()
        process.wait()
    return {"exec to /health": health, "exec to first token": token}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {"--help": [help_seconds() for _ in range(rounds)]}
    for _ in range(rounds):
        for name, seconds in start_seconds().items():
            found.setdefault(name, []).append(seconds)
    for name, values in found.items():
        print(f"{name:22} median {statistics.median(values):6.2f} s   {min(values):.2f} to {max(values):.2f}")
    print(json.dumps({name: round(statistics.median(values), 3) for name, values in found.items()}))


if __name__ == "__main__":
    main()
