"""The identity of blocks changes with everything that changes their content, and with nothing else."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.engine.config import Config
from serve_llm.engine.kv_offload.identity import IRRELEVANT, find_identity
from serve_llm.engine.kv_offload.start import open_store
from serve_llm.engine.parallel.shm import ShmHandle
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.worker.kv_cache import HostMemory, KVCacheConfig
from support.config import CONFIG

KV_CACHE_CONFIG = KVCacheConfig((KVCacheSpec(8, None),), 4096, 7, 3)
MEMORY = [HostMemory(ShmHandle(1, 2, 3), 3, 4096, 0.1)]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(1000))
    return replace(CONFIG, directory=str(model), load_format="auto")


def test_what_changes_blocks_changes_the_identity(config: Config, tmp_path: Path) -> None:
    def identify(
        config: Config, kv_cache_config: KVCacheConfig = KV_CACHE_CONFIG, memory: list[HostMemory] = MEMORY
    ) -> str:
        return find_identity(config, kv_cache_config, memory, tmp_path / "digests")

    first = identify(config)
    assert identify(config) == first
    assert identify(replace(config, seed=config.seed + 1, max_num_seqs=3, data_parallel_rank=1)) == first
    found = {
        first,
        identify(replace(config, dtype="float16")),
        identify(replace(config, kv_cache_dtype="int8")),
        identify(replace(config, tensor_parallel_size=2)),
        identify(replace(config, load_format="dummy")),
        identify(replace(config, load_format="dummy", seed=config.seed + 1)),
        identify(config, replace(KV_CACHE_CONFIG, groups=(KVCacheSpec(16, None),))),
        identify(config, memory=MEMORY * 2),
    }
    weights = Path(config.directory) / "model.safetensors"
    times = weights.stat()
    weights.write_bytes(bytes(999) + b"x")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    found.add(identify(config))
    (Path(config.directory) / "config.json").write_text('{"a": 1}')
    found.add(identify(config))
    assert len(found) == 10


def test_the_settings_that_do_not_count_exist() -> None:
    assert set(IRRELEVANT) <= {field.name for field in fields(Config)}


def test_a_directory_that_cannot_be_made_is_refused(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"--kv-offload-dir .*: Not a directory"):
        open_store(replace(config, kv_offload_dir=str(tmp_path / "file" / "blocks")), KV_CACHE_CONFIG, MEMORY)
