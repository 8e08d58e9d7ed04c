"""Open the store for --kv-offload-dir."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from serve_llm.common.errors import OptionError
from serve_llm.engine.config import Config
from serve_llm.engine.kv_offload.disk_store import DiskBlockStore
from serve_llm.engine.worker.kv_cache import HostMemory, KVCacheConfig

SHARE_OF_FREE = 0.5  # share of the disk's free bytes for blocks without --kv-offload-dir-size


def open_store(config: Config, kv_cache_config: KVCacheConfig, memory: Sequence[HostMemory]) -> DiskBlockStore | None:
    """Return None if no blocks go to disk. memory: the slots of the ranks. Raises OptionError for a bad directory."""
    if config.kv_offload_dir is None or not memory:
        return None
    # Imports torch, which would delay a start without a store.
    from serve_llm.engine.kv_offload.identity import find_identity

    directory = Path(config.kv_offload_dir).expanduser()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "lock").touch(0o600)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise OptionError(f"--kv-offload-dir {directory}: {error.strerror}") from None
    return DiskBlockStore(
        directory,
        lambda: find_identity(config, kv_cache_config, memory, directory / "digests"),
        memory,
        config.kv_offload_dir_size or int(SHARE_OF_FREE * free),
    )
