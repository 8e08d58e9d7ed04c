"""Finding the checkpoint: local, bundled, or on the Hub (which is never contacted); every failure is one line of
advice."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from serve_llm.common.errors import ModelError
from serve_llm.common.hub import read_config, read_json, resolve_config, resolve_model, resolve_tokenizer

Download = Callable[..., str]


def checkpoint(directory: Path, *names: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name in names or ("config.json", "model.safetensors"):
        (directory / name).write_text("{}")
    return directory


@pytest.fixture
def on_the_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Download], None]:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return lambda download: monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def test_local_directory_is_taken_as_it_is(tmp_path: Path, on_the_hub: Callable[[Download], None]) -> None:
    on_the_hub(lambda *_, **__: pytest.fail("asked the Hub"))
    directory = checkpoint(tmp_path / "model")
    assert resolve_model(str(directory)) == directory
    assert resolve_tokenizer(str(directory)) == directory


def test_demo_is_bundled(on_the_hub: Callable[[Download], None]) -> None:
    on_the_hub(lambda *_, **__: pytest.fail("asked the Hub"))
    directory = resolve_model("demo")
    assert directory.name == "demo" and "architectures" in read_config(directory)
    assert resolve_tokenizer("demo") == directory


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model.safetensors"], "no config.json"),
        (["config.json", "pytorch_model.bin"], r"no \*.safetensors .*save_pretrained"),
    ],
)
def test_incomplete_directory(tmp_path: Path, names: list[str], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        resolve_model(str(checkpoint(tmp_path / "model", *names)))


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", "config.json")
    assert resolve_model(str(directory), weights=False) == directory


def test_paths_that_do_not_exist_are_not_looked_up(tmp_path: Path, on_the_hub: Callable[[Download], None]) -> None:
    on_the_hub(lambda *_, **__: pytest.fail("asked the Hub"))
    for name in (str(tmp_path / "none"), "./none", "../none", "a/b/c", "none/"):
        with pytest.raises(ModelError, match="there is no directory"):
            resolve_model(name)
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelError, match="is a file; give the checkpoint directory"):
        resolve_model(str(file))


@pytest.mark.parametrize(
    ("name", "method"),
    [("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt")],
)
def test_quantization_in_a_file_of_its_own(name: str, method: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, "config.json")
    (directory / name).write_text('{"bits": 4}')
    assert read_config(directory) == {"quantization_config": {"quant_method": method, "bits": 4}}
    (directory / name).write_text('{"quant_method": "fp8"}')
    assert read_config(directory) == {"quantization_config": {"quant_method": "fp8"}}
    (directory / "config.json").write_text('{"quantization_config": {"bits": 8}}')
    assert read_config(directory) == {"quantization_config": {"bits": 8}}


def test_an_older_key_of_compressed_tensors(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, "config.json")
    groups = {"config_groups": {"group_0": {}}}
    sparsity = {"sparsity_config": {"format": "dense"}}
    expected = {"quantization_config": {"quant_method": "compressed-tensors", **groups, **sparsity}}
    for old in (groups | sparsity, {"quantization_config": groups, **sparsity}):
        (directory / "config.json").write_text(json.dumps({"compression_config": old}))
        assert read_config(directory) == expected
    for both in ({"compression_config": groups, **expected}, {"compression_config": {}}, {"compression_config": [1]}):
        (directory / "config.json").write_text(json.dumps(both))
        assert read_config(directory) == both, "whose reader refuses what it does not know"


def test_a_quantization_config_may_be_that_of_the_text_part(tmp_path: Path) -> None:
    numbers, others = {"quant_method": "fp8"}, {"quant_method": "awq"}
    path = tmp_path / "config.json"
    for text, whole in ((numbers, {}), (numbers, {"quantization_config": None})):
        path.write_text(json.dumps({"text_config": {"quantization_config": text}, **whole}))
        assert read_config(tmp_path)["quantization_config"] == numbers
    path.write_text(json.dumps({"text_config": {"quantization_config": numbers}, "quantization_config": others}))
    assert read_config(tmp_path)["quantization_config"] == others
    path.write_text(json.dumps({"text_config": [{"quantization_config": numbers}]}))
    assert "quantization_config" not in read_config(tmp_path)


def test_download(tmp_path: Path, on_the_hub: Callable[[Download], None]) -> None:
    asked: list[tuple[object, dict[str, object]]] = []

    def download(name: str, **arguments: object) -> str:
        asked.append((name, arguments))
        return str(checkpoint(tmp_path / "snapshot"))

    on_the_hub(download)
    assert resolve_model("org/model", "v1", "/models") == tmp_path / "snapshot"
    assert resolve_tokenizer("org/other") == tmp_path / "snapshot"
    (name, arguments), (other, text_only) = asked
    assert (name, arguments["revision"], arguments["cache_dir"]) == ("org/model", "v1", "/models")
    assert {"*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"} == set(arguments["allow_patterns"])
    assert (other, text_only["revision"]) == ("org/other", None)
    assert "*.safetensors" not in text_only["allow_patterns"]


def test_gguf_files_of_a_repository(tmp_path: Path, on_the_hub: Callable[[Download], None]) -> None:
    """The name after the colon selects the file, ignoring case; other files may be in the cache too."""
    asked: list[object] = []

    def download(name: str, **arguments: object) -> str:
        asked.append((name, arguments["allow_patterns"]))
        return str(checkpoint(tmp_path / "snapshot", "tiny-Q4_K_M.gguf", "tiny-q8_0.gguf"))

    on_the_hub(download)
    for name, file in (
        ("org/tiny:q4_k_m", "tiny-Q4_K_M"),
        ("org/tiny:Q8_0", "tiny-q8_0"),
        ("org/tiny:tiny-q8_0.gguf", "tiny-q8_0"),
    ):
        with pytest.raises(ModelError, match=rf"{file}\.gguf ends amid the header|{file}\.gguf is not a GGUF file"):
            resolve_model(name)
    with pytest.raises(ModelError, match=r"org/tiny:Q2_K: one file \*Q2_K\.gguf is needed in .*, found: none"):
        resolve_model("org/tiny:Q2_K")
    parts = ["*q4_k_m-*-of-*.gguf", "*Q4_K_M-*-of-*.gguf"]
    assert asked[0] == ("org/tiny", ["*q4_k_m.gguf", "*Q4_K_M.gguf", *parts])


@pytest.mark.parametrize(
    ("method", "expected"), [("AWQ", "awq"), ("compressed_tensors", "compressed-tensors"), ("new", "new"), (3, 3)]
)
def test_spellings_of_methods(method: object, expected: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    assert read_config(tmp_path) == {"quantization_config": {"quant_method": expected}}


def test_gguf_files_beside_that_of_the_model(tmp_path: Path, on_the_hub: Callable[[Download], None]) -> None:
    """The image part has the same suffix, and is not chosen."""
    asked: list[object] = []
    directory = checkpoint(tmp_path / "snapshot", "tiny-F16.gguf", "mmproj-F16.gguf", "tiny-imatrix.gguf")

    def download(name: str, **arguments: object) -> str:
        asked.append(arguments["ignore_patterns"])
        return str(directory)

    on_the_hub(download)
    for model in ("org/tiny:F16", str(directory)):
        with pytest.raises(ModelError, match=r"tiny-F16\.gguf (ends amid the header|is not a GGUF file)"):
            resolve_model(model)
    with pytest.raises(ModelError, match=r"mmproj-F16\.gguf (ends amid the header|is not a GGUF file)"):
        resolve_model("org/tiny:mmproj-F16.gguf")
    assert asked == [["*mmproj*", "*imatrix*"], []]


def test_a_model_whose_name_says_that_an_imatrix_was_used(
    tmp_path: Path, on_the_hub: Callable[[Download], None]
) -> None:
    directory = checkpoint(tmp_path / "snapshot", "tiny-F16-imatrix.gguf")
    asked: list[object] = []

    def download(name: str, **arguments: object) -> str:
        asked.append(arguments["ignore_patterns"])
        return str(directory)

    on_the_hub(download)
    with pytest.raises(ModelError, match=r"tiny-F16-imatrix\.gguf (ends amid the header|is not a GGUF file)"):
        resolve_model("org/tiny:F16-imatrix")
    assert asked == [[]]


def test_gguf_files_without_a_suffix(tmp_path: Path) -> None:
    """As Ollama keeps them."""
    path = tmp_path / "sha256-83c54730"
    path.write_bytes(b"GGUF\3\0\0\0")
    for resolve in (resolve_model, resolve_config):
        with pytest.raises(ModelError, match=r"sha256-83c54730 ends amid the header"):
            resolve(str(path))
    path.write_bytes(b"{}")
    with pytest.raises(ModelError, match=r"sha256-83c54730 is a file; give the checkpoint directory"):
        resolve_model(str(path))


def test_a_named_pipe_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ModelError, match=r"there is no directory .*pipe"):
        resolve_model(str(path))
    path.rename(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_the_home_of_an_unknown_user() -> None:
    for resolve in (resolve_model, resolve_config):
        with pytest.raises(ModelError, match=r"there is no directory ~no-such-user/x/y: check the path"):
            resolve("~no-such-user/x/y")


def test_a_gguf_file_that_is_not_there_is_not_looked_up(on_the_hub: Callable[[Download], None]) -> None:
    on_the_hub(lambda name, **arguments: pytest.fail("asked the Hub"))
    with pytest.raises(ModelError, match=r"there is no file models/x\.gguf: check the path"):
        resolve_model("models/x.gguf")


def test_gguf_parts_of_a_repository(tmp_path: Path, on_the_hub: Callable[[Download], None]) -> None:
    names = [f"Q8_0/tiny-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    (tmp_path / "snapshot" / "Q8_0").mkdir(parents=True)
    on_the_hub(lambda name, **arguments: str(checkpoint(tmp_path / "snapshot", *names, "tiny-Q4_K_M.gguf")))
    with pytest.raises(ModelError, match=r"tiny-Q8_0-00001-of-00002\.gguf (ends amid the header|is not a GGUF file)"):
        resolve_model("org/tiny:Q8_0")
    (tmp_path / "snapshot" / names[0]).unlink()
    names.pop(0)
    with pytest.raises(ModelError, match=r"is one of 2 parts, and .* lacks tiny-Q8_0-00001-of-00002\.gguf"):
        resolve_model("org/tiny:Q8_0")


def test_downloaded_checkpoint_without_safetensors(tmp_path: Path, on_the_hub: Callable[[Download], None]) -> None:
    on_the_hub(lambda *_, **__: str(checkpoint(tmp_path / "snapshot", "config.json")))
    with pytest.raises(ModelError, match=r"org/model: no \*.safetensors"):
        resolve_model("org/model")


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    response = httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/x"))
    return kind("several\nlines", response=response)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (http_error(errors.GatedRepoError, 403), r"on request.*https://huggingface.co/org/model.*HF_TOKEN"),
        (http_error(errors.RepositoryNotFoundError, 404), "check the name, or set HF_TOKEN"),
        (http_error(errors.RevisionNotFoundError, 404), "not revision v1"),
        (errors.HFValidationError("bad"), "nor a possible Hugging Face id"),
        (errors.LocalEntryNotFoundError("none"), "at revision v1 not .* the Hub cannot be reached; check the network"),
        (http_error(errors.HfHubHTTPError, 500), "download failed: HfHubHTTPError: several lines"),
        (OSError(28, "No space left on device"), "download failed: OSError: .*No space left on device"),
    ],
)
def test_failures_of_the_hub(error: Exception, words: str, on_the_hub: Callable[[Download], None]) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    on_the_hub(download)
    with pytest.raises(ModelError, match=f"^org/model: .*{words}") as caught:
        resolve_model("org/model", "v1")
    assert "\n" not in str(caught.value)


def test_a_gated_model_names_the_account(
    on_the_hub: Callable[[Download], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> str:
        raise http_error(errors.GatedRepoError, 403)

    on_the_hub(download)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ModelError, match=r"ask at https://huggingface.co/org/model, then set HF_TOKEN$"):
        resolve_model("org/model")
    monkeypatch.setenv("HF_TOKEN", "secret")
    with pytest.raises(ModelError, match=r"org/model with the account of HF_TOKEN$"):
        resolve_model("org/model")


def test_a_name_without_an_organisation_gets_a_hint(on_the_hub: Callable[[Download], None]) -> None:
    def download(*_: object, **__: object) -> str:
        raise http_error(errors.RepositoryNotFoundError, 404)

    on_the_hub(download)
    for name, hint in (("demoo", "did you mean demo, the"), ("Demo", "did you mean demo"), ("qwen3", "most ids are")):
        with pytest.raises(ModelError, match=f"^{name}: neither .*; {hint}"):
            resolve_model(name)


def test_offline(on_the_hub: Callable[[Download], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise errors.LocalEntryNotFoundError("none")

    on_the_hub(download)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set; unset it$"):
        resolve_model("org/model")


def test_the_cache_only(on_the_hub: Callable[[Download], None]) -> None:
    def download(*_: object, local_files_only: bool, **__: object) -> str:
        assert local_files_only
        raise errors.LocalEntryNotFoundError("none")

    on_the_hub(download)
    for name in ("org/model", "org/model:Q4_K_M"):
        with pytest.raises(ModelError, match=r"^org/model: no local directory, and not \(completely\) in the cache$"):
            resolve_model(name, cached_only=True)


def test_a_cache_that_may_not_be_written(on_the_hub: Callable[[Download], None]) -> None:
    def download(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", "/cache/token")

    on_the_hub(download)
    with pytest.raises(ModelError, match=r"no permission for /cache/token; set HF_HOME or --download-dir to"):
        resolve_model("org/model")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b'{"a": ', "not valid JSON"), (b"\xff", "not valid JSON"), (b"[1]", "must hold a JSON object")],
)
def test_broken_json(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"config.json.* {words}"):
        read_config(tmp_path)


def test_missing_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*x.json: No such file"):
        read_json(tmp_path / "x.json")


def test_of_a_config_nothing_else_is_downloaded(tmp_path: Path, on_the_hub: Callable[[Download], None]) -> None:
    patterns: list[object] = []

    def download(name: str, **arguments: object) -> str:
        patterns.append(arguments["allow_patterns"])
        (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
        return str(tmp_path)

    on_the_hub(download)
    assert read_config(resolve_config("org/model")) == {"architectures": ["X"]}
    assert patterns == [["config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json"]]
    assert resolve_config(str(tmp_path)) == tmp_path
    assert resolve_config("demo") == resolve_model("demo")


def test_the_folders_of_sentence_transformers_come_along(
    tmp_path: Path, on_the_hub: Callable[[Download], None]
) -> None:
    asked = []

    def download(*_: object, allow_patterns: list[str], **__: object) -> str:
        asked.append(allow_patterns)
        directory = checkpoint(tmp_path / "snapshot")
        (directory / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]')
        return str(directory)

    on_the_hub(download)
    resolve_model("org/model")
    assert asked[1:] == [["1_Pooling/*", "2_Dense/*"]]
