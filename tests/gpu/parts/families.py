"""Tokens of tiny models of every other family on the card, compared with transformers on a CPU, in float32. Most of the
time goes to compiling kernels."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from parts import common
from parts.engine import prompts
from support.engine import generate, greedy, make_engine
from support.reference import reference_greedy
from support.tiny import FAMILIES, make_checkpoint

TOLERANCE = 1e-3  # for logprobs


def family(name: str, folder: Path, device: str) -> tuple[bool, str]:
    """Check a family. Returns whether it is correct, and the difference."""
    vocab_size = make_checkpoint(folder, name)
    asked = prompts(vocab_size, (1, 9, 33))
    expected = [reference_greedy(folder, prompt, 10) for prompt in asked]
    engine = make_engine(folder, block_size=16, max_num_batched_tokens=23, device=device)
    found = generate(engine, [greedy(number, prompt, 10, logprobs=1) for number, prompt in enumerate(asked)])
    difference = 0.0
    same = True
    for number, (ids, logprobs) in enumerate(expected):
        result = found[number]
        same = same and result.token_ids == ids
        pairs = zip(result.logprobs, logprobs, strict=True)
        difference = max(difference, *(abs(ours.logprob - theirs) for ours, theirs in pairs))
    return same and difference < TOLERANCE, f"logprobs differ by {difference:.1e}" if same else "other tokens"


def check(here: common.Place, names: Sequence[str], root: Path) -> None:
    """Check several families at a time, as most of it is Triton's compiler and transformers on the CPU. names: the
    slowest first."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(here.sized(16, 1), context, torch.set_num_threads, (1,)) as pool:
        names = names[:2] if here.rehearse else names
        running = {pool.submit(family, name, root / name, here.device): name for name in names}
        for future in as_completed(running):
            try:
                passed, value = future.result()
            except Exception as error:  # the next one may work
                passed, value = False, repr(error)[:200]
            here.report.check(f"{running[future]}: as transformers, float32", passed, value)


def run(here: common.Place, names: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        check(here, names, Path(temporary))


if __name__ == "__main__":
    run(common.place("families"), FAMILIES[-1::-2])
