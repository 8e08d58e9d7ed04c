"""`serve-llm convert`: the same tensors as safetensors; no code in a file is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from serve_llm.cli.convert import command, worker
from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.hub import resolve_model
from serve_llm.common.types import Adapter, LoRATarget
from serve_llm.engine.lora.files import read_adapter
from serve_llm.engine.weights.files import Checkpoint
from support.adapter_files import write_adapter
from support.engine import generate, greedy, make_engine
from support.tiny import make_checkpoint

SANDBOX = """
import socket, subprocess, sys
from serve_llm.cli.convert.sandbox import restrict
restrict(1 << 30, 60, 1 << 20)
for attempt in (
    lambda: socket.socket(),
    lambda: socket.socketpair(),
    lambda: subprocess.run([sys.executable, "-c", ""]),
    lambda: __import__("os").kill(1, 0),
    lambda: open(sys.argv[1], "wb").write(bytes(2 << 20)),
):
    try:
        attempt()
    except OSError as error:
        print(type(error).__name__)
try:
    bytearray(2 << 30)
except MemoryError:
    print("MemoryError")
"""


class Hostile:
    """A command that runs when the pickled object is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.target}",)


def make_bin(directory: Path, files: int = 1) -> dict[str, Tensor]:
    """Write a tiny OPT as facebook publishes it. Returns its tensors."""
    make_checkpoint(directory, "opt", dtype="float16")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").rename(directory.parent / "expected.safetensors")
    if files == 1:
        torch.save(tensors, directory / "pytorch_model.bin")
        return tensors
    names = [f"pytorch_model-{number + 1:05}-of-{files:05}.bin" for number in range(files)]
    placed = {tensor: names[index % files] for index, tensor in enumerate(tensors)}
    for name in names:
        torch.save({tensor: tensors[tensor] for tensor in placed if placed[tensor] == name}, directory / name)
    index = {"metadata": {}, "weight_map": placed}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return tensors


def convert(directory: Path, output: Path) -> int:
    return command.main([str(directory), "-o", str(output)], {})


@pytest.mark.parametrize("files", [1, 2])
def test_the_same_tensors_are_served(files: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = make_bin(tmp_path / "bin", files)
    with pytest.raises(ModelError, match=r"no \*.safetensors .*`serve-llm convert .*bin -o DIR` writes them"):
        resolve_model(str(tmp_path / "bin"))
    assert convert(tmp_path / "bin", tmp_path / "new") == 0
    assert capsys.readouterr().out.endswith(f"serve it by: serve-llm {tmp_path / 'new'}\n")
    checkpoint = Checkpoint(tmp_path / "new")
    assert checkpoint.names == tensors.keys()
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in tensors.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "expected.safetensors", "new"]
    (tmp_path / "bin" / "model.safetensors").symlink_to(tmp_path / "expected.safetensors")
    request = [greedy(1, [3, 1, 4, 1, 5], 4)]
    found = [generate(make_engine(tmp_path / name), request)[1].token_ids for name in ("bin", "new")]
    assert found[0] == found[1]


def make_bin_adapter(directory: Path) -> Adapter:
    """Write an adapter in the format of older PEFT versions."""
    adapter = write_adapter(directory, {"model.layers.0.self_attn.q_proj": (12, 8)})
    torch.save(load_file(directory / "adapter_model.safetensors"), directory / "adapter_model.bin")
    (directory / "adapter_model.safetensors").unlink()
    return adapter


def test_an_adapter_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = make_bin_adapter(tmp_path / "bin")
    assert convert(tmp_path / "bin", tmp_path / "new") == 0
    new = tmp_path / "new"
    assert capsys.readouterr().out.endswith(f"serve it by: serve-llm MODEL --enable-lora --lora-modules NAME={new}\n")
    write_adapter(tmp_path / "expected", {"model.layers.0.self_attn.q_proj": (12, 8)})
    found = load_file(new / "adapter_model.safetensors")
    expected = load_file(tmp_path / "expected" / "adapter_model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    target = LoRATarget("model.layers.0.self_attn.q_proj", 12, 8)
    assert read_adapter(new, {target.module: target}, 16).digest != adapter.digest  # the metadata differs
    assert sorted(path.name for path in new.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_hostile_adapter_is_not_run(tmp_path: Path) -> None:
    make_bin_adapter(tmp_path / "bin")
    torch.save({"a": Hostile(tmp_path / "run")}, tmp_path / "bin" / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"bin/adapter_model.bin: it holds more than tensors"):
        convert(tmp_path / "bin", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]


def test_a_hostile_pickle_is_not_run(tmp_path: Path) -> None:
    make_bin(tmp_path / "bin")
    torch.save({"a": Hostile(tmp_path / "run")}, tmp_path / "bin" / "pytorch_model.bin")
    with pytest.raises(
        ModelError,
        match=r"bin/pytorch_model.bin: it holds more than tensors: it asks for posix.system, which is not run",
    ):
        convert(tmp_path / "bin", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "expected.safetensors"]


def test_the_sandbox_has_no_network_no_programs_and_limits(tmp_path: Path) -> None:
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SANDBOX, str(tmp_path / "large")], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == ["PermissionError"] * 4 + ["OSError", "MemoryError"], done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "no tensors by name"),
        ({}, "no tensors by name"),
        ({"a": 3}, "the entry 'a' is not a named tensor: its type is int"),
        ({3: torch.ones(2)}, "the entry 3 is not a named tensor: its type is Tensor"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "a is a tensor of torch.complex64"),
        ({"a": torch.ones(2).to_sparse()}, "a is a tensor of torch.float32, torch.sparse_coo"),
        ({"a": torch.ones(1).expand(1 << 40)}, "its tensors take more than twice its size"),
    ],
)
def test_what_is_no_checkpoint(content: object, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(worker.BinFileError, match=message):
        worker.read_tensors(tmp_path / "pytorch_model.bin")


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"PK" + bytes(100), b"\x80\x02" + bytes(100), bytes(100)):
        path.write_bytes(damaged)
        with pytest.raises(worker.BinFileError, match="it is damaged"):
            worker.read_tensors(path)
    torch.save({"a": torch.ones(1000), "b": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(worker.read_tensors(path)["a"], torch.ones(1000))


def test_tensors_are_divided_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "FILE_BYTES", 100)
    tensors = {
        name: torch.zeros(size, dtype=torch.uint8) for name, size in zip("abcde", (60, 40, 1, 300, 5), strict=True)
    }
    assert [list(group) for group in worker.divide(tensors)] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--output: .* exists already"):
        convert(tmp_path, tmp_path)
    with pytest.raises(OptionError, match="-o"):
        command.main(["model"], {})
    make_checkpoint(tmp_path / "model", "opt")
    with pytest.raises(ModelError, match="nothing to convert"):
        convert(tmp_path / "model", tmp_path / "new")
    index = tmp_path / "model" / "pytorch_model.bin.index.json"
    for weight_map, message in (
        ({}, "is not an index"),
        ({"a": "../other.bin"}, "names '../other.bin', which is not a .bin file of the same directory"),
        ({"a": "pytorch_model-1.bin"}, "names pytorch_model-1.bin, which is missing"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=message):
            convert(tmp_path / "model", tmp_path / "new")
    torch.save({"b": torch.ones(2)}, tmp_path / "model" / "pytorch_model-1.bin")
    with pytest.raises(ModelError, match=r"pytorch_model-1.bin lacks a, which .* places there"):
        convert(tmp_path / "model", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_bundled_model_has_nothing_to_convert(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"demo: neither pytorch_model\.bin nor .*: nothing to convert"):
        command.main(["demo", "-o", str(tmp_path / "out")], {})
