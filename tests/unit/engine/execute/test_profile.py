"""What is left of a GPU for the KV cache, with a card that is made of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest
import torch

from serve_llm.engine.execute import worker
from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.execute.profile import free_on_gpu
from serve_llm.engine.execute.runner import Runner
from support.config import CONFIG
from support.engine import make_engine
from support.tiny import make_checkpoint

GIB = 1 << 30
OTHERS, HELD, IDLE = 5 * GIB, 20 * GIB, 3 * GIB  # of other processes; weights; cached by torch and not in use
PROMPT, DECODE = 7 * GIB, 2 * GIB  # that the two steps take


@dataclass
class Card:
    """The numbers of `torch.cuda` for one card of 100 GiB, and a runner that takes memory while it tries steps."""

    graphs: object
    idle: int = IDLE
    peak: int = 0
    tried: list[list[int]] = field(default_factory=list)

    def try_step(self, counts: Sequence[int]) -> None:
        self.tried.append(list(counts))
        self.peak = HELD + (PROMPT if len(counts) == 1 else DECODE)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, function in {
            "memory_allocated": lambda device: HELD,
            "max_memory_allocated": lambda device: self.peak,
            "memory_reserved": lambda device: HELD + self.idle,
            "mem_get_info": lambda device: (100 * GIB - OTHERS - HELD - self.idle, 100 * GIB),
            "empty_cache": lambda: setattr(self, "idle", 0),
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", HELD),
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)


@pytest.mark.parametrize(("graphs", "taken"), [(None, PROMPT), (object(), PROMPT + DECODE)])
def test_the_share_of_the_card_less_others_weights_and_steps(
    graphs: object, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(graphs)
    card.patch(monkeypatch)
    config = replace(CONFIG, gpu_memory_utilization=0.9, max_num_seqs=3, max_num_batched_tokens=512, max_model_len=100)
    free = free_on_gpu(config, cast(Runner, card), GIB, torch.device("cuda"))
    assert card.tried == [[99], [1, 1, 1]]  # a prompt leaves room for a token; logits of all rows in any case
    assert free == 90 * GIB - OTHERS - (HELD - GIB) - taken


def test_the_cache_of_the_trial_is_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runner and graphs refer to each other, so that nobody knows when the trial's memory comes back."""
    make_checkpoint(tmp_path, "llama")
    tried: list[int] = []

    def free(config: object, runner: Runner, cache_bytes: int, device: torch.device) -> int:
        tried.append(cache_bytes)
        for counts in ([37], [1] * 5):
            runner.try_step(counts)
        return 1 << 24

    monkeypatch.setattr(worker, "free_on_gpu", free)
    found = make_engine(tmp_path, max_num_seqs=5)._executor._worker  # type: ignore[attr-defined]
    here, make_runner = found._config, found._make_runner

    def runner_on_a_cpu(layout: CacheLayout) -> Runner:
        monkeypatch.setattr(found, "_config", here)
        return cast(Runner, make_runner(layout))

    monkeypatch.setattr(found, "_make_runner", runner_on_a_cpu)
    monkeypatch.setattr(found, "_config", replace(here, device="cuda", kv_cache_memory=None))
    layout = found._plan()
    assert tried == [layout.block_bytes] and layout.num_blocks == (1 << 24) // layout.block_bytes
