"""What a GPU has left for the KV cache, seen by trying the largest steps. Only on a machine with a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serve_llm.engine.config import Config
from serve_llm.engine.execute.runner import Runner


def free_on_gpu(config: Config, runner: Runner, cache_bytes: int, device: torch.device) -> int:
    """Bytes for the cache: this rank's share of the card, less what others and the weights have, and less what steps of
    the largest sizes took. runner: of a small cache of `cache_bytes`, which is not counted."""
    before = torch.cuda.memory_allocated(device)
    prompt = min(config.max_num_batched_tokens, config.max_model_len - 1)
    peaks = [_peak(runner, counts, device) - before for counts in ([prompt], [1] * config.max_num_seqs)]
    taken = max(peaks) if runner.graphs is None else sum(peaks)  # captured steps have memory of their own
    held = before - cache_bytes
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return max(0, int(total * config.gpu_memory_utilization) - others - held - taken)


def _peak(runner: Runner, counts: Sequence[int], device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    runner.try_step(counts)
    return torch.cuda.max_memory_allocated(device)
