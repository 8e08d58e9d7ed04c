"""Any damage to a quantised checkpoint either leaves it loadable or gives one error that says what does not fit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.gguf.file import read_gguf
from serve_llm.common.hub import resolve_model
from serve_llm.server.prompt.tokenizer import load_tokenizer
from support import packed_floats
from support.forward import load
from support.gguf_files import make_gguf
from support.matrix import mostly_slow
from support.packed import Packing, make_packed
from support.quantised import quantise_checkpoint

PACKINGS = {
    "awq": Packing("awq"),
    "awq-gemv": Packing("awq_gemv"),
    "gptq-order": Packing("gptq", has_order=True),
    "w4a16": Packing("compressed", is_symmetric=True),
}
FLOATS = ("fp8-native", "fp8-channel", "modelopt-fp8", "nvfp4", "mxfp4")
FLOATS += ("nf4-nested", "bitsandbytes-int8", "torchao-int4", "quark-int4", "mxfp8")
CHANGES = ("drop", "cut", "flatten", "dtype", "bytes")
FORMS = (*PACKINGS, *FLOATS, "int8")
DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {form: make_form(tmp_path_factory.mktemp(form), "llama", form) for form in FORMS}


def make_form(directory: Path, family: str, form: str) -> Path:
    if form in PACKINGS:
        make_packed(directory, family, PACKINGS[form], num_hidden_layers=1)
    else:
        packed_floats.make_packed(directory, family, "fp8-native" if form == "int8" else form, num_hidden_layers=1)
    if form == "int8":
        shutil.rmtree(directory / "packed")
        quantise_checkpoint(directory / "plain", directory / "packed")
    return directory / "packed"


def list_paths(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the keys and indices that lead to all parts of a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from list_paths(inner, (*path, key))


def change_tensor(tensor: Tensor, change: str, dtype: torch.dtype, seed: int) -> Tensor | None:
    """Change a tensor. Returns None if it is removed."""
    if change == "drop":
        return None
    if change == "cut":
        return tensor[:-1].clone() if tensor.dim() and len(tensor) > 1 else tensor.flatten()[:0].clone()
    if change == "flatten":
        return tensor.flatten() if tensor.dim() > 1 else tensor.reshape(1, -1)
    if change == "dtype":
        return tensor.float().to(dtype)
    noise = torch.Generator().manual_seed(seed)
    flat = tensor.flatten().view(torch.uint8)
    return (
        torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=noise).view(tensor.dtype).reshape(tensor.shape)
    )


@st.composite
def faults(draw: st.DrawFn, directory: Path) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Return config.json, tensors, and what the error must name: the tensor's module, or nothing in particular."""
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(name for name in tensors if "layers" in name and "norm" not in name)))
        dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1000))
        changed = change_tensor(tensors.pop(name), draw(st.sampled_from(CHANGES)), dtype, seed)
        if changed is not None:
            tensors[name] = changed
        return config, tensors, name.partition("_proj")[0]
    *outer, last = draw(st.sampled_from(list(list_paths(config["quantization_config"]))))
    part = config["quantization_config"]
    for key in outer:
        part = part[key]
    part[last] = draw(
        st.one_of(
            st.none(), st.booleans(), st.integers(-2, 2**33), st.floats(), st.text(max_size=4), st.just([]), st.just({})
        )
    )
    return config, tensors, ""


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_faults_are_named(form: str, checkpoints: dict[str, Path], data: st.DataObject, tmp_path: Path) -> None:
    config, tensors, named = data.draw(faults(checkpoints[form]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    try:
        load(tmp_path)
    except (ModelError, OptionError) as error:
        assert named in str(error)


FAMILIES = ("qwen3_moe", "deepseek_v3", "phi3", "gpt_neox")
PAIRS = [  # each format with two families
    (FAMILIES[(index + offset) % len(FAMILIES)], form) for index, form in enumerate(FORMS) for offset in (0, 1)
]


@pytest.mark.parametrize(("family", "form"), mostly_slow(PAIRS, [PAIRS[2], PAIRS[7]]))
def test_every_change_of_every_form_is_named(family: str, form: str, tmp_path: Path) -> None:
    """Makes each kind of change to one tensor of each kind in the format: with experts, latent attention and fused
    projections."""
    directory = make_form(tmp_path, family, form)
    tensors = load_file(directory / "model.safetensors")
    shutil.copy(directory / "config.json", tmp_path)
    by_kind = {re.sub(r"^.*\.\d+\..*(proj\w*|dense\w*|query_key_value)\.", "", name): name for name in sorted(tensors)}
    refused = set()
    for kind, name in by_kind.items():
        if "." in kind and "quant" not in kind and "weight." not in kind:
            continue  # not part of a quantised module
        for change in CHANGES:
            changed = change_tensor(tensors[name], change, torch.int64, seed=3)
            rest = {other: tensor for other, tensor in tensors.items() if other != name}
            damaged = rest if changed is None else rest | {name: changed}
            save_file(damaged, tmp_path / "model.safetensors", metadata={"format": "pt"})
            try:
                load(tmp_path)
            except (ModelError, OptionError) as error:
                assert name.partition(f".{kind}")[0] in str(error), (name, change)
                refused.add(change)
    assert refused >= {"drop", "cut", "dtype"}


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gguf")
    make_gguf(directory, "qwen3", "Q4_K", num_hidden_layers=1)
    return directory / "model.gguf"


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(in_header=st.booleans(), place=st.integers(0, 2**30), change=st.integers(1, 255), length=st.integers(1, 12))
def test_damage_to_a_gguf_file_is_named(
    in_header: bool,
    place: int,
    change: int,
    length: int,
    gguf_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes of the metadata (including the vocabulary) or of tensors differ."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{in_header}-{place}-{change}-{length}"))
    content = bytearray(gguf_file.read_bytes())
    begin = min(tensor.start for tensor in read_gguf(gguf_file).tensors.values())
    first = place % begin if in_header else begin + place % (len(content) - begin)
    for position in range(first, min(first + length, len(content))):
        content[position] ^= change
    (tmp_path / "model.gguf").write_bytes(content)
    try:
        directory = resolve_model(str(tmp_path / "model.gguf"))
        load_tokenizer(directory)
        load(Path(directory))
    except (ModelError, OptionError):
        pass
