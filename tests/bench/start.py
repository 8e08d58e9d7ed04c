"""Measure how long a start takes, and how the engine's log divides that time into phases.

Run: PYTHONPATH=tests python -m bench.start [--rounds 3]. Times --help; then, in turns, for the demo model and the shape
of Qwen2 0.5B in bfloat16, int8 and int4, from exec to /health and to the first token. The phases come from the engine's
log lines; the server's work runs in parallel. Processor time, of all processes with their few requests, says more than
the others if the machine has other work. Prints a table of medians with the spread, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

from bench.model import model_folder
from bench.servers import SERVE_LLM, free_port

LATER_REQUESTS = 9
QUANTIZATIONS = ("int8", "int4")
PHASES = {
    "engine: modules imported": r"Engine modules imported in ([\d.]+) s",
    "engine: weights packed": r"Weights loaded and packed in ([\d.]+) s",
    "engine: kernels compiled (GPU)": r"Kernels compiled in ([\d.]+) s",
    "engine: steps captured (GPU)": r"Common steps captured in ([\d.]+) s",
    "engine: ready, from its main": r"Engine ready after ([\d.]+) s",
    "serving, as the log says": r"Serving .* after ([\d.]+) s",
}


def help_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([SERVE_LLM, "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def seconds_until(url: str, body: bytes | None, began: float, process: subprocess.Popen[bytes]) -> float:
    """Return the seconds until the answer is 200, asking repeatedly."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(url, body, timeout=60):
                return time.perf_counter() - began
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.005)
    raise SystemExit(f"serve-llm ended with code {process.returncode}")


def later_seconds(url: str, process: subprocess.Popen[bytes]) -> list[float]:
    """Return the seconds of requests sent one by one, which differ from the first one only in their prompts."""
    found = []
    for number in range(LATER_REQUESTS):
        body = json.dumps({"prompt": f"def main{number}():", "max_tokens": 1}).encode()
        found.append(seconds_until(url, body, time.perf_counter(), process))
    return found


def start_seconds(model: str, *options: str, **environ: str) -> dict[str, float]:
    """Return the phases' seconds. environ: additional variables."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        command = [SERVE_LLM, model, "--port", str(port), *options]
        process = subprocess.Popen(command, stderr=log, env=os.environ | environ)
        try:
            found = {"exec to /health": seconds_until(f"{url}/health", None, began, process)}
            ready = seconds_until(f"{url}/ready", None, began, process)
            body = b'{"prompt": "def main():", "max_tokens": 1}'
            found["exec to first token"] = seconds_until(f"{url}/v1/completions", body, began, process)
            found["first request once ready"] = found["exec to first token"] - ready
            found["later request"] = statistics.median(later_seconds(f"{url}/v1/completions", process))
        finally:
            process.terminate()
            process.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found["processor time"] = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        log.seek(0)
        text = log.read().decode()
    return found | {name: float(seen[1]) for name, pattern in PHASES.items() if (seen := re.search(pattern, text))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {"--help": [help_seconds() for _ in range(rounds)]}
    shape = str(model_folder())
    variants: dict[str, tuple[str, ...]] = {"demo": ("demo",), "0.5B": (shape,)}
    variants |= {f"0.5B {form}": (shape, "--quantization", form) for form in QUANTIZATIONS}
    for _ in range(rounds):
        for title, (model, *options) in variants.items():
            for name, seconds in start_seconds(model, *options).items():
                found.setdefault(f"{title}, {name}", []).append(seconds)
    for name, values in found.items():
        print(f"{name:42} median {statistics.median(values):6.2f} s   {min(values):.2f} to {max(values):.2f}")
    print(json.dumps({name: round(statistics.median(values), 3) for name, values in found.items()}))


if __name__ == "__main__":
    main()
