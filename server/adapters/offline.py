"""The adapters named in calls of `LLM`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from serve_llm.server.http.errors import InvalidRequest


@dataclass(init=False)
class LoRARequest:
    """An adapter for the methods of `LLM`: LoRARequest("sql", "/adapters/sql")."""

    lora_name: str
    lora_path: str  # directory with adapter_config.json and adapter_model.safetensors, or a Hugging Face id

    def __init__(
        self,
        lora_name: str,
        lora_int_id: int | str | os.PathLike[str] | None = None,
        lora_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """LoRARequest(name, path), or as in vLLM LoRARequest(name, number, path). The number has no meaning here: an
        adapter is identified by its name and its files."""
        if lora_path is None and not isinstance(lora_int_id, int):
            lora_path = lora_int_id
        elif not isinstance(lora_int_id, int | None):
            raise TypeError(f"lora_int_id must be a number, not {lora_int_id!r}")
        if lora_path is None:
            raise TypeError("LoRARequest needs a path: LoRARequest(name, path), or vLLM's LoRARequest(name, 1, path)")
        self.lora_name = lora_name
        self.lora_path = os.fspath(lora_path)


AdapterChoice = LoRARequest | str  # an adapter, or the name of one that is loaded
AdapterChoices = AdapterChoice | Sequence[AdapterChoice | None] | None


def expand_adapters(
    lora_request: AdapterChoices, lora: AdapterChoices, num_prompts: int
) -> Sequence[AdapterChoice | None]:
    """Return one choice per prompt. lora_request, lora: two names of one argument. Raises InvalidRequest."""
    if lora is not None and lora_request is not None:
        raise InvalidRequest("lora and lora_request are the same; give one", "lora")
    chosen = lora_request if lora is None else lora
    if chosen is None or isinstance(chosen, AdapterChoice):
        return [chosen] * num_prompts
    if len(chosen) != num_prompts:
        raise InvalidRequest(f"{len(chosen)} adapters for {num_prompts} prompts", "lora_request")
    return chosen
