"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's fields."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from serve_llm.server.schema.common import RequestBody


class LoadAdapterRequest(RequestBody):
    lora_name: str = Field(min_length=1, description="The name by which requests call the adapter.")
    lora_path: str = Field(
        pattern=r"^[^\x00]+$", description="Its directory on the server's machine, or a Hugging Face id."
    )
    load_inplace: bool | None = Field(default=None, description="Replace the adapter of this name.")


class UnloadAdapterRequest(RequestBody):
    lora_name: str = Field(min_length=1)


class AdapterUnloaded(BaseModel):
    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True
