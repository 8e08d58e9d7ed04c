"""The environment of ranks on other nodes."""

from __future__ import annotations

import subprocess

import pytest

from serve_llm.engine.distributed import launcher
from serve_llm.engine.distributed.environment import apply_variables, select_variables

TRAVELS = (
    "NCCL_DEBUG NCCL_IB_HCA NCCL_IB_GID_INDEX TORCH_NCCL_BLOCKING_WAIT GLOO_SOCKET_FAMILY UCX_TLS HF_TOKEN HF_HOME "
    "HUGGING_FACE_HUB_TOKEN SERVE_LLM_LOG_LEVEL OMP_PROC_BIND MKL_CBWR TRANSFORMERS_OFFLINE PYTHONHASHSEED http_proxy "
    "HTTPS_PROXY no_proxy"
).split()
STAYS = (
    "OMP_NUM_THREADS MKL_NUM_THREADS "
    "CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES NCCL_VISIBLE_DEVICES RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT "
    "NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME SERVE_LLM_HOST_IP NCCL_HOSTID RAY_ADDRESS RAY_AUTH_TOKEN PATH HOME "
    "LD_LIBRARY_PATH PYTHONPATH AWS_SECRET_ACCESS_KEY SERVE_LLM_API_KEY MY_NCCL_DEBUG"
).split()


@pytest.mark.parametrize("name", TRAVELS)
def test_travels(name: str) -> None:
    assert select_variables({name: "1"}) == {name: "1"}


@pytest.mark.parametrize("name", STAYS)
def test_stays(name: str) -> None:
    assert select_variables({name: "1"}) == {}


def test_the_nodes_own_settings_win() -> None:
    environ = {"HF_HOME": "/here"}
    apply_variables(environ, {"HF_HOME": "/there", "HF_TOKEN": "secret"}, initial={"HF_HOME": "/here"})
    assert environ == {"HF_HOME": "/here", "HF_TOKEN": "secret"}


def test_threads_that_ray_guessed_are_forgotten_and_those_that_someone_chose_are_kept() -> None:
    guessed, from_engine, from_node = ({"OMP_NUM_THREADS": "1"} for _ in range(3))
    apply_variables(guessed, {}, initial={})
    apply_variables(from_engine, {"OMP_NUM_THREADS": "6"}, initial={})
    apply_variables(from_node, {"OMP_NUM_THREADS": "6"}, initial={"OMP_NUM_THREADS": "1"})
    assert (guessed, from_engine, from_node) == ({}, {"OMP_NUM_THREADS": "6"}, {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(("given", "expected"), [(None, "AUTO,STRICT"), ("COMPATIBLE", "COMPATIBLE")])
def test_workers_of_a_node_without_an_engine_get_the_defaults(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("MKL_CBWR", raising=False)
    else:
        monkeypatch.setenv("MKL_CBWR", given)
    environs: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: environs.append(env))
    launcher.WorkerLauncher([2, 3], "tcp://127.0.0.1:1")
    assert [environ["MKL_CBWR"] for environ in environs] == [expected] * 2
    assert ["TQDM_DISABLE" in environ for environ in environs] == [False, True]
