"""Check and measure everything that needs a GPU, from a bare checkout, in runs of less than eight minutes:

    python3 tests/gpu/check.py [--parts kernels,engine,...] [--seconds 475] [--out FOLDER]

Run it again until it says that all parts are done. Each part is a separate process with a time limit, so that a failing
part does not stop the others; a part starts only if its limit fits into the remaining time. tests/gpu/results.json
keeps the results of the parts. A run takes the parts that never ran on this card, in order of worth, then those that
failed; or those that --parts names. `python tests/gpu/figures.py` writes the results into docs/gpu.md.

It needs torch, Triton, transformers, tokenizers and safetensors in the Python that runs it, and wheels of everything
else (`python3 tests/gpu/wheels.py` on a machine with a package index puts them into .whl/, which travels with the
tree). Nothing is installed: a folder of links provides the import names. Prints one table, then one line of JSON.
FOLDER gets table.md of this run, results.json, and the output of the parts as log.txt; all are updated after each part.
The exit code is 0 if every check passed, whatever was measured.

    python3 tests/gpu/check.py --rehearse

runs all parts with tiny models and without a GPU, to find mistakes in this script. Its measurements mean nothing, so
tests/gpu/results.json is neither read nor written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import wheels
from report import Row, read_rows, table
from results import Attempt, Run, merge_runs, newest_attempts, read_runs, unfinished, write_runs

ROOT = Path(__file__).resolve().parents[2]
DEVICE = Path("/dev/nvidiactl")  # created by the driver
RESULTS = ROOT / "tests" / "gpu" / "results.json"
SECONDS = {  # time limit of each part, in order of worth
    "machine": 30,
    "kernels": 140,
    "attention_kernels": 140,
    "engine": 130,
    "ranks": 130,
    "idle": 60,
    "mixed": 60,
    "speed": 60,
    "families": 80,
    "more_families": 75,
    "features": 70,
    "start": 90,
    "attention_times": 45,
    "flash": 60,
    "fp8": 40,
    "stored_fp8": 55,
    "int4": 55,
    "experts": 60,
    "latent": 60,
    "memory": 30,
    "offline": 80,
    "server": 80,
    "bench": 60,
    "invariance": 60,
    "peer": 60,
}
# These measure nothing; compilers take most of their time.
AT_ONCE = {"kernels", "attention_kernels", "engine", "ranks"}
TOTAL_SECONDS = 475  # seconds of a run, by default
REHEARSAL = 6  # factor on limits without a GPU, beside other work


def environment(folder: Path) -> dict[str, str]:
    """Return the environment in which parts can import the tree, the tests' modules and the wheels. folder: for links
    and wheels."""
    package = folder / "serve_llm"
    package.mkdir()
    for entry in (ROOT / "serve_llm").iterdir():
        (package / entry.name).symlink_to(entry)
    for name in ("cli", "common", "server", "engine", "kernels"):
        (package / name).symlink_to(ROOT / name)
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / f"serve_llm-{told['version']}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: {told['version']}\n")
    program = folder / "bin" / "serve-llm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable} -P\nfrom serve_llm.cli.main import main\nraise SystemExit(main())\n")
    program.chmod(0o755)
    paths = [folder, *wheels.unpack(ROOT / ".whl", folder / "wheels"), ROOT / "tests", ROOT / "tests" / "gpu"]
    environ = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    return environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }


def run_part(name: str, environ: dict[str, str], folder: Path, seconds: float, rehearse: bool) -> Attempt:
    """Run a part to its end or for at most this many seconds."""
    written = folder / f"{name}.jsonl"
    command = [sys.executable, "-P", "-m", f"parts.{name}", str(written), *(["--rehearse"] if rehearse else [])]
    began = time.monotonic()
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            problem = "" if process.wait(seconds) == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {seconds:.0f} s"
        finally:
            wheels.end_group(process)
    rows = read_rows(written)
    if problem:
        last = (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-15:]
        print(f"--- {name}: {problem}\n" + "\n".join(last), file=sys.stderr)
        rows.append(Row(name, "the part itself", problem, passed=False))
    took = round(time.monotonic() - began, 1)
    return Attempt(took, problem, [*rows, Row(name, "seconds", took, "s")])


def next_parts(left: Sequence[str], seconds: float) -> list[str]:
    """Return what to run next in this many seconds: the first part that fits, and the parts that run alongside. Empty
    if none fits."""
    fitting = [name for name in left if SECONDS[name] <= seconds]
    if not fitting:
        return []
    first = fitting[0]
    return [name for name in fitting if name in AT_ONCE] if first in AT_ONCE else [first]


def run_parts(
    names: Iterable[str], deadline: float, scale: float, run: Callable[[str], Attempt]
) -> Iterator[dict[str, Attempt]]:
    """Run the parts that fit before the deadline, with limits multiplied by `scale`; yields as each group ends."""
    left = list(names)
    while now := next_parts(left, (deadline - time.monotonic()) / scale):
        with ThreadPoolExecutor(len(now)) as pool:
            yield dict(zip(now, pool.map(run, now), strict=True))
        left = [name for name in left if name not in now]


def read_card() -> tuple[str, str]:
    """Return name and driver version of the first GPU. Raises LookupError if there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if not DEVICE.exists():
        raise LookupError(f"there is no NVIDIA GPU ({DEVICE} is missing); --rehearse does without")
    if shutil.which(command[0]) is None:
        return "unknown", "unknown"
    said = subprocess.run(command, capture_output=True, text=True).stdout.strip().splitlines()
    card, _, driver = (said or ["unknown, unknown"])[0].partition(", ")
    return card, driver


def write_folder(out: Path, run: Run, runs: Iterable[Run], logs: Path) -> None:
    """Write table.md, results.json and log.txt. logs: folder with the parts' output."""
    write_runs(out / "results.json", runs)
    (out / "table.md").write_text(table(run.rows) + "\n")
    with (out / "log.txt").open("wb") as log:
        for name in run.parts:
            log.write(f"=== {name}\n".encode() + (logs / f"{name}.log").read_bytes())


def perform(given: argparse.Namespace, names: list[str], earlier: list[Run], this: Run) -> None:
    """Add parts to `this` run. Results are saved after each one."""
    scale = REHEARSAL if given.rehearse else 1
    deadline = time.monotonic() + scale * given.seconds
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environ = environment(folder)

        def run(name: str) -> Attempt:
            return run_part(name, environ, folder, scale * SECONDS[name], given.rehearse)

        for found in run_parts(names, deadline, scale, run):
            this.parts |= found
            runs = merge_runs(earlier, [this])
            if not given.rehearse:
                write_runs(RESULTS, runs)
            if given.out is not None:
                write_folder(given.out, this, runs, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help=f"of {', '.join(SECONDS)} (default: those that are not done yet)")
    parser.add_argument("--out", type=Path, help="folder for table.md, results.json and log.txt")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="of this run (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, no GPU")
    given = parser.parse_args()
    try:
        card, driver = ("rehearsal", "none") if given.rehearse else read_card()
    except LookupError as error:
        parser.error(str(error))
    earlier = [] if given.rehearse else read_runs(RESULTS)
    same_card = [run for run in earlier if run.card == card]
    names = given.parts.split(",") if given.parts else unfinished(SECONDS, newest_attempts(same_card))
    if unknown := [name for name in names if name not in SECONDS]:
        parser.error(f"--parts: no part is called {unknown[0]}")
    command = "check.py" + " --rehearse" * given.rehearse + (f" --parts {given.parts}" if given.parts else "")
    this = Run(datetime.now(UTC).isoformat(timespec="milliseconds"), card, driver, command)
    perform(given, names, earlier, this)
    print(table(this.rows))
    print(json.dumps({"command": this.command, "rows": [row.plain() for row in this.rows]}))
    left = unfinished(SECONDS, newest_attempts([*same_card, this]))
    if left and not given.parts:
        print(f"Not done yet: {', '.join(left)}. Run the same command again.", file=sys.stderr)
    elif not left:
        print("All parts are done.", file=sys.stderr)
    return 0 if all(row.passed is not False for row in this.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
