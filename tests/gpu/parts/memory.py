"""Memory used on the card after every size of decode step has been captured, compared with the plan at start:
--gpu-memory-utilization of the card, graphs included."""

from __future__ import annotations

from pathlib import Path

import torch
from floors import LLAMA_8B

from parts import common
from parts.engine_steps import prompt
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.worker.graphs import list_decode_sizes
from support.engine import make_engine

STEPS_OF_A_SIZE = 3  # the first is eager, the second captures, the third replays
MIB = 2**20


def capture_ladder(engine: EngineCore, batch: int) -> list[int]:
    """Decode this many sequences together, then gradually fewer. Returns the numbers of sequences that were decoded."""
    requests = []
    for number in range(batch):
        later = sum(size > number for size in list_decode_sizes(batch))  # sizes whose steps compute this sequence
        tokens = 2 + STEPS_OF_A_SIZE * later
        requests.append(EngineCoreRequest(id=number, prompt_ids=prompt(16, number), sampling=sampling(tokens)))
    engine.add_requests(requests)
    seen = []
    while engine.has_work:
        seen.append(engine.step().stats.step_tokens)
    return seen


def sampling(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, seed=0)


def used_bytes() -> tuple[int, int]:
    """Return the bytes used on the card by all processes, and those reserved by torch in this process."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free, torch.cuda.memory_reserved()


def main() -> None:
    here = common.place("memory")
    batch = here.sized(256, 8)
    options = {key: value for key, value in here.options().items() if key != "log_level"}
    planned = {"kv_cache_memory": options.get("kv_cache_memory")}  # None: what the utilization leaves
    engine = make_engine(Path(here.folder(LLAMA_8B)), **{**options, **planned, "max_num_seqs": batch})
    before = (0, 0) if here.rehearse else used_bytes()
    seen = capture_ladder(engine, batch)
    sizes = set(list_decode_sizes(batch))
    here.report.check("every size of the ladder was decoded", all(seen.count(size) >= 2 for size in sizes))
    if here.rehearse:
        here.report.not_run("memory of the graphs", "there is no GPU")
        return
    after = used_bytes()
    total = torch.cuda.get_device_properties(0).total_memory
    here.report.measured("KV cache", engine.kv_cache_config.num_bytes / MIB, "MiB")
    here.report.measured("reserved by torch before the first step", before[1] / MIB, "MiB")
    here.report.measured(f"more of it after {len(sizes)} sizes were captured", (after[1] - before[1]) / MIB, "MiB")
    here.report.measured("more of the card, driver included", (after[0] - before[0]) / MIB, "MiB")
    share = after[0] / total
    here.report.measured("card in use, share of its memory", share, aim=0.9)
    here.report.check("the card holds no more than was planned", share <= 0.9 + 0.02, f"{share:.3f} of 0.900")


if __name__ == "__main__":
    main()
