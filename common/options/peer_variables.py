"""Environment variables of other engines, which are not read, and their counterparts here."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from serve_llm.common.options.sources import is_service_address

logger = logging.getLogger(__name__)

OLLAMA = {
    "OLLAMA_HOST": "`--host`, `--port`",
    "OLLAMA_MODELS": "`--download-dir`",
    "OLLAMA_CONTEXT_LENGTH": "`--max-model-len`; the default is the model's own maximum",
    "OLLAMA_NUM_PARALLEL": "`--max-num-seqs`; the default is 256",
    "OLLAMA_MAX_QUEUE": "`--max-queue`",
    "OLLAMA_KEEP_ALIVE": "not needed: the model stays loaded",
    "OLLAMA_MAX_LOADED_MODELS": "not needed: a server has one model; start one for each",
    "OLLAMA_FLASH_ATTENTION": "not needed",
    "OLLAMA_KV_CACHE_TYPE": "`--kv-cache-dtype int8`",
    "OLLAMA_ORIGINS": "`--allowed-origins`",
    "OLLAMA_DEBUG": "`--log-level debug`",
    "OLLAMA_GPU_OVERHEAD": "`--gpu-memory-utilization`",
    "OLLAMA_SCHED_SPREAD": "`--tensor-parallel-size`",
    "OLLAMA_LOAD_TIMEOUT": "not needed: loading takes as long as it takes",
}

VLLM = {
    "VLLM_API_KEY": "`--api-key`, or the variable `SERVE_LLM_API_KEY`",
    "VLLM_HOST_IP": "the variable `SERVE_LLM_HOST_IP`",
    "VLLM_LOGGING_LEVEL": "`--log-level`",
    "VLLM_LOGGING_CONFIG_PATH": "`--log-level` and `--log-format`",
    "VLLM_CPU_KVCACHE_SPACE": "`--kv-cache-memory`, with a unit",
    "VLLM_CPU_OMP_THREADS_BIND": "`--cpu-threads`",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "`--cpu-threads`",
    "VLLM_PP_LAYER_PARTITION": "`--pipeline-parallel-layers`",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "`--step-timeout`",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "`--step-timeout`",
    "VLLM_NO_USAGE_STATS": "not needed: no statistics of use are sent",
    "VLLM_DO_NOT_TRACK": "not needed: no statistics of use are sent",
    "VLLM_USE_V1": "not needed: there is one engine",
    "VLLM_ATTENTION_BACKEND": "not needed: the kernels are chosen by device and instruction set",
    "VLLM_BATCH_INVARIANT": "`--batch-invariant`; on a CPU it is always so",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "an `--api-key` that begins with `admin:` may load adapters",
    "VLLM_USE_MODELSCOPE": "models come from Hugging Face; download others and give the directory",
}

LLAMA_CPP = {"LLAMA_API_KEY": "`--api-key`, or the variable `SERVE_LLM_API_KEY`"}

# How the variables of other engines begin.
PREFIXES = ("VLLM_", "SGLANG_", "LLAMA_ARG_", "OLLAMA_")

PEER_VARIABLES = OLLAMA | VLLM | LLAMA_CPP


def log_unread(environ: Mapping[str, str]) -> None:
    """Log a warning for each variable of another engine that is set, because nothing else reveals that it is unused."""
    for name, answer in PEER_VARIABLES.items():
        if environ.get(name):
            logger.warning("%s is set but not read; here: %s", name, answer)
    others = [
        name
        for name, value in sorted(environ.items())
        if name.startswith(PREFIXES) and name not in PEER_VARIABLES and not is_service_address(name, value)
    ]
    if others:
        logger.warning(
            "%s: variables of other engines are not read; options are set by SERVE_LLM_<OPTION> "
            "(docs/from-other-engines.md)",
            ", ".join(others),
        )
