"""Checks and measures everything that needs a GPU, in one command and less than eight minutes, from a bare checkout:

    python3 tests/gpu/check.py [--parts kernels,engine,...] [--out FOLDER]

It needs torch, Triton, transformers, tokenizers and safetensors in the Python that runs it, and wheels of what else is
missing (`python3 tests/gpu/wheels.py` on a machine with a package index puts them into .whl/, which travels with the
tree). Nothing is installed: a folder of links gives the import names. Each part is a process of its own, with a limit,
so that one that fails leaves the others their turn. Prints one table, then one line of JSON; FOLDER gets both, as
table.md and result.json, and what the parts said, as log.txt.
The exit code is 0 if every check passed, whatever was measured.

    python3 tests/gpu/check.py --rehearse

does the same with tiny models and without a GPU, in order to find mistakes of this script: what it measures then means
nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import wheels
from report import Row, read_rows, table

ROOT = Path(__file__).resolve().parents[2]
SECONDS = {  # each one's limit; what all take is less than the total
    "machine": 30,
    "kernels": 120,
    "engine": 120,
    "ranks": 90,
    "speed": 120,
    "bench": 70,
    "start": 50,
    "server": 90,
    "idle": 60,
    "invariance": 50,
    "peer": 60,
}
AT_ONCE = {"kernels", "engine", "ranks"}  # these measure nothing, and most of their time is compilers'
TOTAL_SECONDS = 475
REHEARSAL = 4  # times as long, without a GPU and beside other work


def environment(folder: Path) -> dict[str, str]:
    """What lets the parts import the tree, the tests' modules and the wheels. folder: for links and wheels."""
    package = folder / "serve_llm"
    package.mkdir()
    for entry in (ROOT / "serve_llm").iterdir():
        (package / entry.name).symlink_to(entry)
    for name in ("server", "engine", "kernels"):
        (package / name).symlink_to(ROOT / name)
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / f"serve_llm-{told['version']}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: {told['version']}\n")
    program = folder / "bin" / "serve-llm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable} -P\nfrom serve_llm.server.__main__ import main\nraise SystemExit(main())\n")
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


def run_part(name: str, environ: dict[str, str], folder: Path, seconds: float, rehearse: bool) -> list[Row]:
    """The rows that the part wrote, and one more if it failed."""
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
    return [*rows, Row(name, "seconds", round(time.monotonic() - began, 1), "s")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(SECONDS), help=f"of {', '.join(SECONDS)}")
    parser.add_argument("--out", type=Path, help="folder for table.md, result.json and log.txt")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, no GPU")
    given = parser.parse_args()
    names = given.parts.split(",")
    if unknown := [name for name in names if name not in SECONDS]:
        parser.error(f"--parts: no part is called {unknown[0]}")
    times = REHEARSAL if given.rehearse else 1
    deadline = time.monotonic() + times * TOTAL_SECONDS
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environ = environment(folder)

        def run(name: str) -> list[Row]:
            left = deadline - time.monotonic()
            if left < 5:
                return [Row(name, "the part itself", "not run: no time was left", passed=False)]
            return run_part(name, environ, folder, min(times * SECONDS[name], left), given.rehearse)

        rows: list[Row] = []
        for at_once, group in itertools.groupby(names, AT_ONCE.__contains__):
            with ThreadPoolExecutor(len(AT_ONCE) if at_once else 1) as pool:
                rows += itertools.chain.from_iterable(pool.map(run, group))
        text = table(rows)
        line = json.dumps({"command": " ".join(sys.argv), "rows": [row.plain() for row in rows]})
        print(text)
        print(line)
        if given.out is not None:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / "table.md").write_text(text + "\n")
            (given.out / "result.json").write_text(line + "\n")
            with (given.out / "log.txt").open("wb") as log:
                for name in names:
                    said = folder / f"{name}.log"
                    log.write(f"=== {name}\n".encode() + (said.read_bytes() if said.exists() else b""))
    return 0 if all(row.passed is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
