"""The LoRA adapters that requests may name. A separate process checks each one completely before it gets its name."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from serve_llm.common.adapter_files import Stamp, read_stamp
from serve_llm.common.errors import AdapterError, ModelError
from serve_llm.common.hub import resolve_adapter
from serve_llm.common.messages import AdapterCheck, AdapterVerdict
from serve_llm.common.types import Adapter, ModelInfo
from serve_llm.server.adapters.offline import AdapterChoice
from serve_llm.server.http.errors import InvalidRequest, ModelNotFound

CHECK_SECONDS = 300.0  # for reading and checking one adapter

logger = logging.getLogger(__name__)


class AdapterRegistry:
    """Engines load an adapter when a request first needs it; the registry only holds its name."""

    def __init__(
        self, model_info: ModelInfo, max_rank: int, model_names: Collection[str], download_dir: str | None = None
    ) -> None:
        """model_info: of an engine that is ready. model_names: those of the base model, which no adapter may have.
        download_dir: for adapters on the Hub."""
        self.adapters: dict[str, Adapter] = {}  # by name
        self._model_info = model_info
        self._max_rank = max_rank
        self._model_names = model_names
        self._download_dir = download_dir
        self._stamps: dict[str, Stamp] = {}  # by name, of the files before they were checked
        self._sources: dict[str, str] = {}  # by name: a directory or Hugging Face id, as it was given
        self._lock = asyncio.Lock()

    async def load(self, name: str, directory: str, in_place: bool = False) -> Adapter:
        """Check an adapter and give it a name. directory: or a Hugging Face id, whose files are downloaded. in_place:
        replace the adapter with this name, if there is one.

        Open requests keep the adapter with which they started. Raises AdapterError if it cannot be served,
        InvalidRequest if the name is taken.
        """
        self._check_name(name, in_place)
        try:
            path = await asyncio.to_thread(resolve_adapter, directory, self._download_dir)
        except ModelError as error:
            raise AdapterError(f"the adapter {name} cannot be served: {error}") from None
        async with self._lock:
            self._check_name(name, in_place)
            verdict, stamp = await asyncio.to_thread(self._check, path)
            if verdict.error:
                raise AdapterError(f"the adapter {name} cannot be served: {verdict.error}")
            adapter = Adapter(name, str(path), verdict.digest)
            self.adapters[name] = adapter
            self._stamps[name] = stamp
            self._sources[name] = directory
            logger.info("Adapter %s loaded from %s", name, path)
            return adapter

    def _check_name(self, name: str, in_place: bool) -> None:
        if name in self._model_names:
            raise InvalidRequest(f"{name} is the name of the base model", "lora_name")
        if name in self.adapters and not in_place:
            raise InvalidRequest(f"the adapter {name} is loaded; set load_inplace to load it again", "lora_name")

    async def load_all(self, modules: Iterable[str]) -> None:
        """modules: NAME=DIRECTORY or NAME=HUGGING_FACE_ID each. Raises AdapterError."""
        for module in modules:
            name, _, directory = module.partition("=")
            await self.load(name, directory)

    async def obtain(self, request: AdapterChoice) -> Adapter:
        """Return the adapter of an offline request, loaded if it is new or its files have changed; or the one with a
        given name. Raises as `load` does, and InvalidRequest if there is no adapter with this name."""
        if isinstance(request, str):
            if request not in self.adapters:
                raise InvalidRequest(
                    f"there is no adapter {request}; load it with LoRARequest({request!r}, path) or lora_modules",
                    "lora_request",
                )
            return self.adapters[request]
        known = self.adapters.get(request.lora_name)
        if known is not None and self._sources[request.lora_name] == request.lora_path:
            try:
                if read_stamp(Path(known.directory)) == self._stamps[request.lora_name]:
                    return known
            except OSError:
                pass  # `load` reports what is missing
        return await self.load(request.lora_name, request.lora_path, in_place=True)

    def unload(self, name: str) -> None:
        """Drop the adapter's name; open requests continue. Raises ModelNotFound."""
        if name not in self.adapters:
            raise ModelNotFound(f"there is no adapter {name}", "lora_name")
        del self.adapters[name]
        del self._stamps[name]
        del self._sources[name]
        logger.info("Adapter %s unloaded", name)

    def _check(self, directory: Path) -> tuple[AdapterVerdict, Stamp]:
        """Runs in a thread."""
        try:
            stamp = read_stamp(directory)
        except OSError:
            stamp = ()  # the check reports what is missing
        check = AdapterCheck(str(directory), self._model_info.lora_targets, self._max_rank, self._model_info.directory)
        command = [sys.executable, "-P", "-m", "serve_llm.engine.lora.check"]
        try:
            done = subprocess.run(
                command, input=msgspec.msgpack.encode(check), stdout=subprocess.PIPE, timeout=CHECK_SECONDS
            )
        except subprocess.TimeoutExpired:
            return AdapterVerdict(error=f"reading {directory} took more than {CHECK_SECONDS:g} s"), stamp
        if done.returncode != 0:
            return AdapterVerdict(error=f"the process that read {directory} died"), stamp
        return msgspec.msgpack.decode(done.stdout, type=AdapterVerdict), stamp
