"""The whole engine on the card: the same tokens as on a CPU for a mixed load; results that do not depend on the rest of
the batch, where that is promised; and fp8 layers."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch

from parts import common
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from support.engine import Result, generate, greedy, make_engine
from support.reference import reference_logprobs
from support.tiny import make_checkpoint

# Required share of equal sampled texts. Some draws are so close to the boundary between two tokens that weights changed
# by 1e-7 give the other one.
LEAST_SAMPLED = 0.8


def prompts(vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def mixed_load(here: common.Place, folder: Path) -> None:
    vocab_size = make_checkpoint(folder, "llama")
    rng = random.Random(3)
    requests = []
    for number, prompt in enumerate(prompts(vocab_size, tuple(rng.choice((1, 3, 17, 40)) for _ in range(40)))):
        kinds: tuple[dict[str, object], ...] = (
            {"temperature": 0.0},
            {"temperature": 0.9, "top_p": 0.9},
            {"temperature": 1.2, "top_k": 9, "logprobs": 2},
            {"temperature": 0.0, "repetition_penalty": 1.3},
            {"temperature": 0.7, "min_p": 0.05, "bad_words_ids": ((1,), (2, 3))},
        )
        sampling = Sampling(**({"max_tokens": 24, "seed": number} | kinds[number % len(kinds)]))  # type: ignore[arg-type]
        requests.append(EngineCoreRequest(id=number, prompt_ids=prompt, sampling=sampling))
    arrivals = [rng.randrange(20) for _ in requests]
    sizes = {"max_num_seqs": 24, "max_num_batched_tokens": 64}
    expected = generate(make_engine(folder, device="cpu", **sizes), requests, arrivals)
    for name, options in {"": {}, ", --enforce-eager": {"enforce_eager": True}}.items():
        engine = make_engine(folder, device=here.device, **sizes, **options)
        found = generate(engine, requests, arrivals)
        is_same = [found[request.id].token_ids == expected[request.id].token_ids for request in requests]
        greedy_ones = [request.sampling.temperature == 0 for request in requests]
        greedy_same = sum(same for same, one in zip(is_same, greedy_ones, strict=True) if one)
        sampled, sampled_same = len(requests) - sum(greedy_ones), sum(is_same) - greedy_same
        value = f"{greedy_same} of {sum(greedy_ones)} requests"
        here.report.check(f"mixed load as on a CPU, greedy{name}", greedy_same == sum(greedy_ones), value)
        value = f"{sampled_same} of {sampled} requests"
        here.report.check(f"mixed load as on a CPU, sampled{name}", sampled_same >= LEAST_SAMPLED * sampled, value)
        if not here.rehearse and not options:
            here.report.check("decode steps were captured", captured(engine) > 0, f"{captured(engine)} graphs")


def captured(engine: EngineCore) -> int:
    return len(engine._executor._worker._runner.graphs._graphs)  # type: ignore[attr-defined]


def invariance(here: common.Place, folder: Path) -> None:
    """Check in bfloat16, where another order of additions shows at once."""
    vocab_size = make_checkpoint(folder, "llama")
    asked = prompts(vocab_size, (1, 5, 17, 40, 64, 100))
    requests = [greedy(number, prompt, 24, logprobs=1) for number, prompt in enumerate(asked)]
    options = {"dtype": "bfloat16", "device": here.device, "batch_invariant": True, "enable_prefix_caching": False}
    together = generate(make_engine(folder, max_num_batched_tokens=50, **options), requests)
    apart: dict[int, Result] = {}
    for request in requests:
        apart |= generate(make_engine(folder, max_num_batched_tokens=256, **options), [request])
    same = all(
        (together[number].token_ids, together[number].logprobs) == (result.token_ids, result.logprobs)
        for number, result in apart.items()
    )
    here.report.check("--batch-invariant: alone and in company the same bits", same)


def quantised(here: common.Place, folder: Path) -> None:
    """Compare logprobs of prompts from fp8 layers with transformers' float32."""
    name = "--quantization fp8: as transformers, as far as 8 bits go"
    if here.rehearse:
        here.report.not_run(name, "it is served on GPUs only")
        return
    asked = prompts(make_checkpoint(folder, "llama", dtype="bfloat16", std=0.1), (2, 16, 40, 150))
    tell_error(here, name, make_engine(folder, device=here.device, quantization="fp8"), folder, asked)


def tell_error(here: common.Place, name: str, engine: EngineCore, folder: Path, asked: list[list[int]]) -> None:
    """Check the logprobs of prompts against transformers' float32, with a tolerance for fp8."""
    found = generate(engine, [greedy(number, prompt, 8, prompt_logprobs=1) for number, prompt in enumerate(asked)])
    ours, exact = [], []
    for number, prompt in enumerate(asked):
        logprobs = reference_logprobs(folder, prompt)
        exact += [float(logprobs[place, token]) for place, token in enumerate(prompt[1:])]
        ours += [one.logprob for one in found[number].prompt_logprobs or ()]
    wanted = torch.tensor(exact)
    error = float((torch.tensor(ours) - wanted).norm() / (wanted - wanted.mean()).norm())
    here.report.check(name, 0.01 < error < 0.3, f"an error of {error:.2f} of their spread")


def main() -> None:
    here = common.place("engine")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        mixed_load(here, root / "mixed")
        invariance(here, root / "invariance")
        quantised(here, root / "quantised")


if __name__ == "__main__":
    main()
