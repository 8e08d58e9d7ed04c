"""Packages that a GPU machine without a package index lacks: downloaded as wheels here, unpacked there.

    python3 tests/gpu/wheels.py        where there is an index: fills .whl/ at the root of the tree

For Python 3.12 on x86-64. Packages that the machine has anyway (`PRESENT`) are excluded.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Packages on the machine: it also has the dependencies of torch, transformers and accelerate.
PRESENT = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "huggingface-hub")
# The dependencies, in the versions required by pyproject.toml. fastapi brings pydantic.
PACKAGES = (
    "pyzmq",
    "msgspec",
    "fastapi",
    "uvicorn",
    "uvloop",
    "httptools",
    "prometheus-client",
    "psutil",
    "llguidance",
)
# vLLM's wheel contains FlashAttention-3 with paging, in a library that works with any recent torch. Only that file is
# included.
FLASH_WHEEL, FLASH_LIBRARY = "vllm==0.33.0", "_vllm_fa3_C.abi3.so"
# pip accepts only wheels with exactly these tags. glibc 2.31 is that of Ubuntu 20.04; llguidance needs it.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(31, 16, -1)), "manylinux2014_x86_64")
MOST_BYTES = 60 << 20  # limit on the bytes of the tree and the wheels


def requirements() -> list[str]:
    """Return PACKAGES with the bounds of pyproject.toml. Raises KeyError for a package that it does not name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {}
    for text in [*project["optional-dependencies"]["dev"], *project["dependencies"]]:
        requirement, _, _ = text.partition(";")
        name = re.match(r"[\w.-]+", requirement)
        if name:
            named[name[0]] = requirement.strip()
    return [named[name] for name in PACKAGES]


def fetch(folder: Path) -> None:
    """Download the wheels. Raises CalledProcessError if one is not available."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    where = [word for platform in PLATFORMS for word in ("--platform", platform)]
    python = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *python, *where]
    subprocess.run([*command, "--dest", str(folder), *requirements()], check=True)
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run([*command, "--dest", temporary, "--no-deps", FLASH_WHEEL], check=True)
        (whole,) = Path(temporary).glob("*.whl")
        with (
            zipfile.ZipFile(whole) as source,
            zipfile.ZipFile(folder / "vllm_fa3-0-py3-none-any.whl", "w", zipfile.ZIP_LZMA) as target,
        ):
            (name,) = (name for name in source.namelist() if name.endswith(FLASH_LIBRARY))
            target.writestr("vllm_fa3/__init__.py", "")
            target.writestr(f"vllm_fa3/{FLASH_LIBRARY}", source.read(name))


def tree_bytes(root: Path) -> int:
    """Return the bytes of all files in a checkout, except the wheels."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return sum((root / name).lstat().st_size for name in names if name and os.path.lexists(root / name))


def unpack(folder: Path, to: Path) -> list[Path]:
    """Return the folders to add to sys.path: one, or none without wheels."""
    found = sorted(folder.glob("*.whl")) if sys.version_info[:2] == (3, 12) else []
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(to)
    return [to] if found else []


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a group, and whatever it left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    fetch(ROOT / ".whl")
    size = sum(path.stat().st_size for path in (ROOT / ".whl").glob("*.whl"))
    print(f"{size / 2**20:.1f} MiB of wheels in {ROOT / '.whl'}")
    if size + tree_bytes(ROOT) > MOST_BYTES:
        raise SystemExit(f"the tree and the wheels are more than {MOST_BYTES >> 20} MiB")
