"""`serve-llm convert MODEL -o DIR`: convert a checkpoint of pytorch_model*.bin files, or an adapter in
adapter_model.bin, to safetensors.

No file is unpickled in this process: a `worker`, which can do nothing else, reads each file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from serve_llm.common.adapter_files import ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_WEIGHTS, is_pickled_adapter
from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.hub import BIN_INDEX, BIN_SINGLE, read_json, resolve_bin_model
from serve_llm.common.options.schema import OPTION_FIELDS
from serve_llm.common.options.sources import make_parser, merge_sources, read_command_line
from serve_llm.common.weight_files import INDEX
from serve_llm.engine.worker.kv_cache import format_bytes

CONVERT_FIELDS = [option for option in OPTION_FIELDS if option.name in ("model", "revision", "download_dir")]
DESCRIPTION = (
    "Write a checkpoint of pytorch_model*.bin files, or a LoRA adapter of adapter_model.bin, anew, with safetensors, "
    "which the server reads. The files are read in a process without network and with limits, which builds tensors "
    "from them and runs no code."
)
COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
SECONDS, BYTES_PER_SECOND = 120, 10 << 20  # the minimum time for a file, and the slowest pace beyond it
VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "TMPDIR")  # no tokens, no proxies


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Convert. Return 0. Raises ServeError."""
    given = read_command_line(create_parser(), argv)
    output = Path(str(given.pop("output"))).expanduser()
    options = merge_sources(given, environ)
    if output.exists():
        raise OptionError(f"--output: {output} exists already; name a directory that does not")
    directory = resolve_bin_model(options.model, options.revision, options.download_dir)
    with _create_directory(output) as making:
        if is_pickled_adapter(directory):
            convert_adapter(directory, making)
            how = f"serve-llm MODEL --enable-lora --lora-modules NAME={output}"
        else:
            convert_model(directory, making)
            how = f"serve-llm {output}"
    sys.stdout.write(f"serve it by: {how}\n")
    return 0


def create_parser() -> argparse.ArgumentParser:
    parser = make_parser("serve-llm convert", DESCRIPTION, CONVERT_FIELDS)
    parser.usage = "serve-llm convert MODEL -o DIR [options]"
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="directory to write; it must not exist")
    return parser


@contextlib.contextmanager
def _create_directory(output: Path) -> Iterator[Path]:
    """Yield a directory to write to, which becomes `output` at the end of the block. Raises ModelError."""
    making = output.with_name(f"{output.name}.partial")
    shutil.rmtree(making, ignore_errors=True)
    try:
        making.mkdir(parents=True)
        yield making
        making.rename(output)
    except OSError as error:
        raise ModelError(f"{output} cannot be written: {error}") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)


def convert_model(directory: Path, making: Path) -> None:
    """Write the checkpoint in `directory` to `making`. Raises ModelError."""
    expected = _read_bin_index(directory)
    weight_map: dict[str, str] = {}
    total = 0
    for number, name in enumerate(sorted(set(expected.values())) or [BIN_SINGLE]):
        path = directory / name
        for file, sizes in _run_worker(path, making / f"model-{number:05}").items():
            if repeated := sorted(sizes.keys() & weight_map.keys()):
                raise ModelError(f"{path}: {repeated[0]} is in another file too")
            (making / file).chmod(0o644)
            weight_map |= dict.fromkeys(sizes, file)
            total += sum(sizes.values())
        lacking = {tensor for tensor, file in expected.items() if file == name} - weight_map.keys()
        if lacking:
            raise ModelError(f"{path} lacks {min(lacking)}, which {BIN_INDEX} places there; download it again")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (making / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    for pattern in COPIED:
        for path in directory.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, making / path.name)


def convert_adapter(directory: Path, making: Path) -> None:
    """Write the adapter in `directory` to `making`. Raises ModelError."""
    path = directory / ADAPTER_PICKLE
    files = _run_worker(path, making / "adapter")
    if len(files) > 1:
        raise ModelError(f"{path} is larger than an adapter can be: its tensors fill {len(files)} files")
    (file,) = files
    (making / file).rename(making / ADAPTER_WEIGHTS)
    (making / ADAPTER_WEIGHTS).chmod(0o644)
    shutil.copyfile(directory / ADAPTER_CONFIG, making / ADAPTER_CONFIG)


def _read_bin_index(directory: Path) -> dict[str, str]:
    """Tensor -> its file; empty if there is only one file."""
    if (directory / BIN_SINGLE).is_file():
        return {}
    path = directory / BIN_INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} is not an index of pytorch_model*.bin files")
    names = {str(tensor): str(name) for tensor, name in weight_map.items()}
    for name in sorted(set(names.values())):
        if Path(name).name != name or not name.endswith(".bin"):
            raise ModelError(f"{path} names {name!r}, which is not a .bin file of the same directory")
        if not (directory / name).is_file():
            raise ModelError(f"{path} names {name}, which is missing; download it again")
    return names


def _run_worker(path: Path, prefix: Path) -> dict[str, dict[str, int]]:
    """Convert one file. Return the files written -> their tensors with their bytes. Raises ModelError."""
    size = path.stat().st_size
    sys.stdout.write(f"reading {path.name} ({format_bytes(size)})\n")
    sys.stdout.flush()
    seconds = SECONDS + size // BYTES_PER_SECOND
    command = [sys.executable, "-P", "-m", "serve_llm.cli.convert.worker", str(path), str(prefix), str(seconds)]
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ} | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{path}: reading it took more than {seconds} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if done.returncode > 0 and lines else f"its reader ended with {done.returncode}"
        raise ModelError(f"{path}: {reason}")
    return {str(file): dict(sizes) for file, sizes in json.loads(done.stdout).items()}
