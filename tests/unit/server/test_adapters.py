"""Adapters over HTTP: who may load them, their names, and what becomes of requests that use them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from serve_llm.common.types import LoRATarget
from serve_llm.server.adapters.offline import LoRARequest, expand_adapters
from serve_llm.server.adapters.registry import AdapterRegistry
from serve_llm.server.http.errors import InvalidRequest
from support.asgi import Reply
from support.fakes import make_model_info
from support.serving import Served

MODULE = "model.layers.0.self_attn.q_proj"
MODEL_INFO = make_model_info(lora_targets={MODULE: LoRATarget(MODULE, 12, 8)})
ADMIN = {"authorization": "Bearer admin:secret"}
OTHER = {"authorization": "Bearer plain"}
OPTIONS = {"enable_lora": True, "api_key": ("plain", "admin:secret")}


def write_adapter(directory: Path, value: float = 1.0) -> str:
    directory.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    prefix = f"base_model.model.{MODULE}"
    tensors = {f"{prefix}.lora_A.weight": torch.full((2, 8), value), f"{prefix}.lora_B.weight": torch.ones(12, 2)}
    save_file(tensors, directory / "adapter_model.safetensors")
    return str(directory)


@pytest.fixture
def server(serve: Callable[..., Served]) -> Served:
    return serve(options=OPTIONS, model_info=MODEL_INFO)


def load(server: Served, name: str, directory: str, **fields: object) -> Reply:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": directory} | fields, ADMIN)


def ask(server: Served, name: str) -> list[Reply]:
    """Return the replies of all routes that generate text."""
    messages = [{"role": "user", "content": "hi"}]
    return [
        server.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1}, OTHER),
        server.post("/v1/chat/completions", {"model": name, "messages": messages, "max_tokens": 1}, OTHER),
        server.post("/v1/messages", {"model": name, "messages": messages, "max_tokens": 1}, OTHER),
        server.post("/v1/responses", {"model": name, "input": "hi", "max_output_tokens": 1}, OTHER),
    ]


def test_an_adapter_of_the_hub(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_adapter(tmp_path / "snapshot")
    asked = []

    def download(name: str, **arguments: object) -> str:
        asked.append((name, arguments["allow_patterns"]))
        if name != "org/sql":
            raise OSError("no network")
        return directory

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    card = load(server, "sql", "org/sql").json()
    assert (card["id"], card["root"]) == ("sql", directory)
    assert asked == [("org/sql", ["adapter_config.json", "adapter_model.safetensors"])]
    reply = load(server, "chat", "org/chat")
    assert reply.status == 400 and "org/chat: download failed: OSError: no network" in reply.content.decode()
    for name in ("no-directory", "/no/directory", "../no/directory", "a/b/c"):
        assert "is not a directory" in load(server, "chat", name).content.decode()
    assert len(asked) == 2


def test_an_adapter_is_loaded_asked_listed_and_unloaded(server: Served, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    assert [reply.status for reply in ask(server, "sql")] == [404] * 4
    card = load(server, "sql", directory).json()
    assert (card["id"], card["root"], card["parent"]) == ("sql", directory, "demo")
    models = server.get("/v1/models", OTHER).json()
    assert [(one["id"], one["parent"]) for one in models["data"]] == [("demo", None), ("sql", "demo")]
    assert server.get("/v1/models/sql", OTHER).json() == card
    replies = ask(server, "sql")
    assert [(reply.status, reply.json()["model"]) for reply in replies] == [(200, "sql")] * 4
    adapters = [request.adapter for request in server.engine.submitted]
    assert len(adapters) == 4 and len(set(adapters)) == 1
    assert adapters[0] is not None and (adapters[0].name, adapters[0].directory) == ("sql", directory)
    assert [reply.status for reply in ask(server, "demo")] == [200] * 4
    assert all(request.adapter is None for request in server.engine.submitted[4:])
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "sql"}, ADMIN).json()["deleted"] is True
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "sql"}, ADMIN).status == 404
    assert [reply.status for reply in ask(server, "sql")] == [404] * 4


def test_vectors_with_an_adapter(serve: Callable[..., Served], tmp_path: Path) -> None:
    targets = MODEL_INFO.lora_targets
    changed = make_model_info(lora_targets=targets, pooling_task="embed", vector_size=2)
    server = serve(script=lambda request: (1.0, 0.0), options=OPTIONS, model_info=changed)
    load(server, "sql", write_adapter(tmp_path / "a"))
    for route in ("/v1/embeddings", "/pooling"):
        reply = server.post(route, {"model": "sql", "input": [[5], [6]]}, OTHER)
        assert (reply.status, reply.json()["model"]) == (200, "sql")
        assert server.post(route, {"model": "other", "input": [[5]]}, OTHER).status == 404
    server.post("/v1/embeddings", {"model": "demo", "input": [[5]]}, OTHER)
    names = [request.adapter and request.adapter.name for request in server.engine.submitted]
    assert names == ["sql"] * 4 + [None]


def test_large_bodies_find_adapters_too(server: Served, tmp_path: Path) -> None:
    """A worker process parses large bodies."""
    load(server, "sql", write_adapter(tmp_path / "a"))
    body = {"prompt": "x" * 9000, "truncate_prompt_tokens": 5, "max_tokens": 1}
    assert server.post("/v1/completions", body | {"model": "sql"}, OTHER).status == 200
    assert server.engine.submitted[0].adapter is not None
    reply = server.post("/v1/completions", body | {"model": "other"}, OTHER)
    assert reply.status == 404 and "this server serves demo, sql" in reply.json()["error"]["message"]


def test_only_administrators_load_and_unload(serve: Callable[..., Served], server: Served, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    for path, body in (
        ("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": directory}),
        ("/v1/unload_lora_adapter", {"lora_name": "sql"}),
    ):
        assert server.post(path, body, OTHER).status == 403
        assert server.post(path, body).status == 401
        assert serve(options={"enable_lora": True}, model_info=MODEL_INFO).post(path, body).status == 403
        without = serve().post(path, body)
        assert without.status == 404 and "--enable-lora" in without.json()["error"]["message"]
    assert len(server.get("/v1/models", OTHER).json()["data"]) == 1


def test_a_name_is_taken_once_unless_it_is_replaced(server: Served, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    assert load(server, "demo", directory).status == 400
    assert load(server, "sql", directory).status == 200
    assert "load_inplace" in load(server, "sql", directory).json()["error"]["message"]
    ask(server, "sql")
    write_adapter(tmp_path / "a", 2.0)
    assert load(server, "sql", directory, load_inplace=True).status == 200
    ask(server, "sql")
    digests = [request.adapter.digest for request in server.engine.submitted if request.adapter is not None]
    assert len(set(digests[:4])) == len(set(digests[4:])) == 1 and digests[0] != digests[4]


def test_a_bad_adapter_leaves_everything_as_it_was(server: Served, tmp_path: Path) -> None:
    good = write_adapter(tmp_path / "good")
    bad = write_adapter(tmp_path / "bad", float("nan"))
    load(server, "sql", good)
    for name, fields in (("new", {}), ("sql", {"load_inplace": True})):
        reply = load(server, name, bad, **fields)
        assert reply.status == 400 and reply.json()["error"]["code"] == "invalid_adapter"
        assert "contains numbers that are not finite" in reply.json()["error"]["message"]
    assert load(server, "new", str(tmp_path / "missing")).status == 400
    assert load(server, "new", good, rank=3).json()["error"]["param"] == "rank"
    assert [one["root"] for one in server.get("/v1/models", OTHER).json()["data"][1:]] == [good]


def test_an_expression_that_takes_any_time_is_refused(server: Served, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "slow")
    config = json.loads((tmp_path / "slow" / "adapter_config.json").read_text())
    slow = r"((\w|\.)+)+x"  # takes 2 ** (characters of the name) steps
    (tmp_path / "slow" / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {slow: 3}}))
    reply = load(server, "slow", directory)
    assert reply.status == 400
    assert "rank_pattern and alpha_pattern take more than 1 s to match" in reply.json()["error"]["message"]


def test_copies_of_the_base_are_compared(serve: Callable[..., Served], tmp_path: Path) -> None:
    """An adapter of the LM head comes with a copy of the base model's weight."""
    checkpoint = tmp_path / "base"
    checkpoint.mkdir()
    weight = torch.randn(12, 8)
    save_file({"lm_head.weight": weight}, checkpoint / "model.safetensors")
    head = LoRATarget("lm_head", 12, 8, "head", ("lm_head.weight",))
    server = serve(
        options=OPTIONS, model_info=make_model_info(lora_targets={"lm_head": head}, directory=str(checkpoint))
    )
    directory = tmp_path / "adapter"
    write_adapter(directory)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["lm_head"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    prefix = "base_model.model.lm_head"
    tensors = {f"{prefix}.lora_A.weight": torch.ones(2, 8), f"{prefix}.lora_B.weight": torch.ones(12, 2)}
    save_file(tensors | {f"{prefix}.base_layer.weight": weight}, directory / "adapter_model.safetensors")
    assert load(server, "same", str(directory)).status == 200
    save_file(tensors | {f"{prefix}.base_layer.weight": weight + 1}, directory / "adapter_model.safetensors")
    reply = load(server, "other", str(directory))
    assert reply.status == 400
    assert f"{prefix}.base_layer.weight is not the base model's" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["", "\x00", "a\x00b"])
def test_a_path_that_is_none_is_named(server: Served, path: str) -> None:
    reply = load(server, "one", path)
    assert reply.status == 400 and reply.json()["error"]["param"] == "lora_path"  # type: ignore[index]


def test_fingerprints_follow_the_adapter(server: Served, tmp_path: Path) -> None:
    load(server, "sql", write_adapter(tmp_path / "a"))
    prints = [ask(server, name)[0].json()["system_fingerprint"] for name in ("demo", "sql", "sql")]
    assert prints[0] != prints[1] == prints[2]


def test_the_name_of_a_loaded_adapter_is_enough_offline(tmp_path: Path) -> None:
    async def run() -> None:
        registry = AdapterRegistry(MODEL_INFO, 16, ["demo"])
        with pytest.raises(InvalidRequest, match=r"there is no adapter sql; load it with LoRARequest\('sql', path\)"):
            await registry.obtain("sql")
        loaded = await registry.obtain(LoRARequest("sql", write_adapter(tmp_path / "sql")))
        assert await registry.obtain("sql") == loaded

    asyncio.run(run())


def test_requests_offline_in_both_forms() -> None:
    assert LoRARequest("sql", 1, "/sql") == LoRARequest("sql", Path("/sql")) == LoRARequest("sql", lora_path="/sql")
    assert LoRARequest(lora_name="sql", lora_int_id=2, lora_path="/sql").lora_path == "/sql"
    with pytest.raises(TypeError, match="needs a path"):
        LoRARequest("sql", 1)
    with pytest.raises(TypeError, match="lora_int_id must be a number, not '/sql'"):
        LoRARequest("sql", "/sql", "/other")


def test_one_adapter_for_all_prompts_or_one_for_each() -> None:
    sql = LoRARequest("sql", "/sql")
    assert expand_adapters(sql, None, 2) == expand_adapters(None, sql, 2) == [sql, sql]
    assert expand_adapters(None, [None, "sql"], 2) == [None, "sql"]
    assert expand_adapters(None, None, 2) == [None, None]
    with pytest.raises(InvalidRequest, match="1 adapters for 2 prompts"):
        expand_adapters(["sql"], None, 2)
    with pytest.raises(InvalidRequest, match="lora and lora_request are the same; give one"):
        expand_adapters("sql", "sql", 2)
