"""Features of the engine on the card: adapters, drafts, grammars, vectors, blocks read back from host memory, an fp8 KV
cache. The tokens must be those of an engine on a CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import msgspec
import torch

from parts import common
from parts.engine import prompts, tell_error
from serve_llm.common.types import Adapter, EngineCoreRequest
from serve_llm.engine.scheduler import speculation
from serve_llm.engine.worker.memory import FP8_CACHE_CAPABILITIES
from support.adapter_files import write_adapter
from support.engine import Result, generate, greedy, make_engine
from support.grammars import EOS, SCHEMA, accepts, compile_grammar, constrained, demo, text_of
from support.mtp import make_mtp_checkpoint
from support.pooled import compute_vectors, make_pooled_checkpoint, pooling_request
from support.speculation import NGRAM, draft_freely, make_similar
from support.tiny import make_checkpoint

BLOCKS: dict[str, object] = {"block_size": 16}
VECTOR_TOLERANCE = 1e-4


def tell_same(
    here: common.Place,
    name: str,
    requests: Sequence[EngineCoreRequest],
    found: dict[int, Result],
    expected: dict[int, Result],
) -> None:
    same = sum(found[request.id].token_ids == expected[request.id].token_ids for request in requests)
    here.report.check(f"{name}: tokens as on a CPU", same == len(requests), f"{same} of {len(requests)} requests")


def adapters(here: common.Place, folder: Path) -> None:
    vocab_size = make_checkpoint(folder / "model", "llama", head_dim=16)
    shapes = {"self_attn.o_proj": (60, 96), "mlp.up_proj": (97, 60), "mlp.down_proj": (60, 97)}
    layers = {f"model.layers.{layer}.{name}": shape for layer in range(3) for name, shape in shapes.items()}
    chosen: list[Adapter | None] = [None]
    chosen += [write_adapter(folder / f"adapter{number}", layers, 3 + number, number) for number in range(3)]
    asked = prompts(vocab_size, (2, 9, 33, 17, 5, 40, 3, 21))
    requests = [
        msgspec.structs.replace(greedy(number, prompt, 12), adapter=chosen[number % len(chosen)])
        for number, prompt in enumerate(asked)
    ]
    options = BLOCKS | {"enable_lora": True, "max_loras": 2}
    expected = generate(make_engine(folder / "model", device="cpu", **options), requests)
    found = generate(make_engine(folder / "model", device=here.device, **options), requests)
    tell_same(here, "3 adapters in 2 slots", requests, found, expected)


def drafts(here: common.Place, folder: Path) -> None:
    vocab_size = make_checkpoint(folder / "model", "llama")
    draft = {"method": "draft_model", "model": str(make_similar(folder / "model", folder / "draft"))}
    requests = [greedy(number, prompt * 2, 100) for number, prompt in enumerate(prompts(vocab_size, (1, 8, 21, 40)))]
    expected = generate(make_engine(folder / "model", device="cpu", **BLOCKS), requests)
    for name, config in {"prompt lookup": NGRAM, "a draft model": draft | {"num_speculative_tokens": 4}}.items():
        options = BLOCKS | {"speculative_config": config}
        engine = draft_freely(make_engine(folder / "model", device=here.device, **options))
        tell_same(here, name, requests, generate(engine, requests), expected)
        stats = engine.scheduler.stats()
        value = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens}"
        here.report.check(f"{name}: drafts were accepted", stats.num_accepted_tokens > 0, value)


def mtp(here: common.Place, folder: Path) -> None:
    """Check drafts of a random layer, nearly all of which are wrong."""
    layer = make_mtp_checkpoint(folder, "deepseek_v3")
    asked = prompts(layer.model.config.vocab_size, (1, 8, 21, 40))
    requests = [greedy(number, prompt, 16) for number, prompt in enumerate(asked)]
    expected = generate(make_engine(folder, device="cpu", **BLOCKS), requests)
    config = {"method": "mtp", "num_speculative_tokens": 3}
    with mock.patch.object(speculation, "MIN_RATE", 0.0):
        engine = draft_freely(make_engine(folder, device=here.device, speculative_config=config, **BLOCKS))
        tell_same(here, "an MTP layer", requests, generate(engine, requests), expected)
    drafted = engine.scheduler.stats().num_draft_tokens
    here.report.check("an MTP layer: it proposed tokens", drafted > 0, f"{drafted} tokens")


def grammars(here: common.Place, folder: Path) -> None:
    grammar = compile_grammar(json=SCHEMA)
    numbers = range(here.sized(8, 2))
    requests = [constrained(number, grammar, temperature=(0.0, 1.5)[number % 2]) for number in numbers]
    options = {"dtype": "float32", "max_model_len": 512}
    found = generate(make_engine(demo(), device=here.device, **options), requests)
    texts = [text_of([token for token in result.token_ids if token != EOS]) for result in found.values()]
    valid = sum(accepts(grammar, text) for text in texts)
    here.report.check("texts of a JSON schema are valid", valid == len(requests), f"{valid} of {len(requests)}")
    expected = generate(make_engine(demo(), device="cpu", **options), requests)
    tell_same(here, "a JSON schema, greedy", requests[::2], found, expected)


def vectors(here: common.Place, folder: Path) -> None:
    for architecture, pooling in (("BertModel", "mean"), ("Qwen3Model", "last")):
        asked = prompts(make_pooled_checkpoint(folder / architecture, architecture), (1, 7, 16, 40, 63))
        requests = [pooling_request(number, prompt) for number, prompt in enumerate(asked)]
        expected, found = (
            compute_vectors(make_engine(folder / architecture, device=device, pooling_type=pooling, **BLOCKS), requests)
            for device in ("cpu", here.device)
        )
        difference = max(float((found[number] - expected[number]).abs().max()) for number in expected)
        name = f"vectors of {architecture} as on a CPU"
        here.report.check(name, difference < VECTOR_TOLERANCE, f"they differ by {difference:.1e}")


def offload(here: common.Place, folder: Path) -> None:
    """Check six conversations that take turns in a cache for little more than one."""
    vocab_size = make_checkpoint(folder, "llama")
    texts = prompts(vocab_size, (60,) * 6)
    turns = [
        [greedy(10 * turn + number, text[: 20 + 20 * turn], 6) for number, text in enumerate(texts)]
        for turn in range(3)
    ]
    options: dict[str, object] = {"block_size": 8, "max_model_len": 96, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    plain = make_engine(folder, device="cpu", enable_prefix_caching=False, **options)
    block_bytes = plain.kv_cache_config.block_bytes
    small = {
        "kv_cache_memory": (plain.kv_cache_config.blocks_per_request(96, 64) + 2) * block_bytes,
        "kv_offload_memory": 60 * block_bytes,
    }
    engine = make_engine(folder, device=here.device, **options | small)
    expected: dict[int, Result] = {}
    found: dict[int, Result] = {}
    for requests in turns:
        expected |= generate(plain, requests)
        found |= generate(engine, requests, [2 * number for number in range(len(requests))])
    every = [request for requests in turns for request in requests]
    tell_same(here, "blocks from host memory", every, found, expected)
    stats = engine.step().stats.offload_memory
    hits = 0 if stats is None else stats.num_hits
    here.report.check("blocks came back from host memory", hits > 0, f"{hits} hits")


def fp8_cache(here: common.Place, folder: Path) -> None:
    """Check logprobs of prompts in chunks, of which all but the first read keys and values that were rounded."""
    name = "--kv-cache-dtype fp8: as transformers, as far as 8 bits go"
    if here.rehearse or torch.cuda.get_device_capability() not in FP8_CACHE_CAPABILITIES:
        here.report.not_run(name, "it is served on GPUs of compute capability 8.9 and 9.0 only")
        return
    asked = prompts(make_checkpoint(folder, "llama", dtype="bfloat16", head_dim=16, std=0.1), (2, 16, 40, 150))
    engine = make_engine(folder, device=here.device, kv_cache_dtype="fp8", max_num_batched_tokens=16, **BLOCKS)
    tell_error(here, name, engine, folder, asked)


def main() -> None:
    here = common.place("features")
    parts: tuple[Callable[[common.Place, Path], None], ...] = (
        adapters,
        mtp,
        drafts,
        grammars,
        vectors,
        offload,
        fp8_cache,
    )
    with tempfile.TemporaryDirectory() as temporary:
        for part in parts:
            folder = Path(temporary) / part.__name__
            folder.mkdir()
            try:
                part(here, folder)
            except Exception as error:  # the next one may work
                here.report.check(part.__name__, False, repr(error)[:200])


if __name__ == "__main__":
    main()
