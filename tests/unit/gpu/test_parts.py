"""How the parts of the GPU check use their measurements, without a GPU: with fakes, and a tiny engine on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.roofline import Limits
from serve_llm.kernels import registry
from serve_llm.kernels.backends.flash_attention import FlashAttention
from support.flash_library import FlashLibrary
from support.gpu_check import ROOT, load_module

common, figures, floors, report = (load_module(name) for name in ("parts.common", "figures", "floors", "report"))
engine_steps = load_module("parts.engine_steps")
ranks = load_module("parts.ranks")
KernelSpan = engine_steps.KernelSpan
SPANS = [KernelSpan("attend", 0.0, 60.0), KernelSpan("mm", 60.0, 90.0), KernelSpan("mm", 100.0, 110.0)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to run on a card: full sizes, with measured rates of an H200."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(common, "limits", lambda rehearse: floors.H200)
    return common.Place(report.Report("part", tmp_path / "rows"), rehearse=False)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return common.Place(report.Report("part", tmp_path / "rows"), rehearse=True)


def rows(here: Any) -> dict[str, Any]:
    return {row.name: row for row in report.read_rows(here.report._path)}


def test_idle_is_what_no_kernel_covers() -> None:
    spans = [(0.0, 10.0), (5.0, 20.0), (30.0, 40.0), (30.0, 35.0), (50.0, 100.0)]
    assert engine_steps.busy(spans, 0.0, 100.0) == 80.0 and engine_steps.busy(spans, 15.0, 45.0) == 15.0
    assert engine_steps.idle_share(reversed(spans)) == pytest.approx(20 / 80), "a tenth at either end does not count"
    assert engine_steps.idle_share([(0.0, 1.0), (1.0, 2.0)]) == 0.0


def test_the_kernels_with_the_most_time() -> None:
    assert engine_steps.top_kernels(SPANS) == [("attend", 60.0, 1), ("mm", 40.0, 2)]
    assert engine_steps.top_kernels(SPANS, count=1) == [("attend", 60.0, 1)]


def test_kernels_are_rows(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_steps, "kernels_of", lambda call: SPANS)
    engine_steps.tell_kernels(here, "8B", lambda: None, 2, aim=0.03)
    found = rows(here)
    assert found["8B: idle share of the GPU"].value == pytest.approx(9 / 88, abs=1e-4), "but for a tenth at either end"
    assert found["8B: kernels of a step, one after the other"].value == 0.05
    assert (found["8B: kernel 1"].value, found["8B: kernel 2"].value) == (30.0, 20.0)
    assert found["8B: kernel 2"].unit == "µs a step, 40%, 1 launches: `mm`"
    monkeypatch.setattr(engine_steps, "kernels_of", lambda call: [])
    engine_steps.tell_kernels(here, "0.5B", lambda: None, 2)
    assert "saw no kernel" in rows(here)["0.5B: idle share of the GPU"].value


def test_a_step_beside_its_floor(here: Any) -> None:
    spec, chunks = floors.LLAMA_8B.spec(), floors.decodes(64)
    least = floors.floor_seconds(spec, chunks)
    common.tell_step(here, "decode", 2 * least, spec, chunks, floors.H200, aim=0.7)
    common.tell_step(here, "slower card", 2 * least, spec, chunks, Limits(2150.0, 395_000.0))
    found = rows(here)
    assert found["decode"].value == pytest.approx(2000 * least, rel=1e-3) and found["decode"].unit == "ms"
    assert (found["decode: share of the floor"].value, found["decode: share of the floor"].aim) == (0.5, 0.7)
    assert found["slower card: share of the floor"].value == 1.0


def test_arrivals_are_steps_of_decodes_and_one_prompt(tiny: Any) -> None:
    engine = engine_steps.decoding_engine(tiny, tiny.folder(floors.LLAMA_8B), [20, 50], 12, spare=400)
    executed: list[float] = []
    assert engine_steps.timed_steps(engine, 3, executed) > 0 and len(executed) == 3
    took, computed = engine_steps.Arrivals(engine, 17).run(4)
    assert took > 0 and computed == [2 + 17] * 4
    assert engine.scheduler.num_running == 2, "those that arrived have ended"


def test_the_whole_ladder_is_captured(tiny: Any) -> None:
    memory = load_module("parts.memory")
    engine = engine_steps.make_engine(
        Path(tiny.folder(floors.LLAMA_8B)),
        max_num_seqs=18,
        device="cpu",
        load_format="dummy",
        kv_cache_memory="64MiB",
    )
    seen = memory.capture_ladder(engine, 18)
    assert all(seen.count(size) >= 2 for size in memory.list_decode_sizes(18))


class FakeLLM:
    """Has room for 400 requests of 1000 tokens in and out."""

    _replicas = SimpleNamespace(model_info=SimpleNamespace(kv_cache_tokens=800_000))

    def __init__(self, folder: str, **options: object) -> None:
        assert Path(folder, "config.json").is_file()

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None: ...


@contextlib.contextmanager
def fake_server(recipe: Any) -> Iterator[Any]:
    yield SimpleNamespace(url="")


@pytest.fixture
def on_a_card(here: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace every part's measurements; only the evaluation is real."""
    speed, mixed, idle, start = (load_module(f"parts.{name}") for name in ("speed", "mixed", "idle", "start"))
    times, server, invariance = (load_module(f"parts.{name}") for name in ("attention_times", "server", "invariance"))
    offline, stored = (load_module(f"parts.{name}") for name in ("offline", "stored_fp8"))
    monkeypatch.setattr(stored, "Numbers", lambda device: None)
    monkeypatch.setattr(stored, "is_supported", lambda *given: False)
    monkeypatch.setattr(
        stored.registry, "with_triton", lambda **given: replace(registry.PORTABLE, pack_stored_fp8=print)
    )
    monkeypatch.setattr(speed, "decode_rate", lambda *given: 100.0)
    monkeypatch.setattr(speed, "prompt_seconds", lambda *given: 0.25)
    monkeypatch.setattr(invariance, "decode_rate", lambda *given: 100.0)
    monkeypatch.setattr(invariance, "prompt_seconds", lambda *given: 0.25)
    for module in (offline, server):
        monkeypatch.setattr(module, "generate", lambda *given, **named: 50.0)
    for module in (speed, offline, server, invariance):
        monkeypatch.setattr(module, "LLM", FakeLLM)
    result = SimpleNamespace(tokens_per_second=9e3, ttft_p50=0.1, itl_p99=0.02, errors=0, first_error=None)
    monkeypatch.setattr(server, "running", fake_server)
    monkeypatch.setattr(server.load, "run", lambda *given: result)
    engine = SimpleNamespace(has_work=False, abort_requests=lambda messages: None)
    for module in (mixed, idle):
        monkeypatch.setattr(module, "decoding_engine", lambda *given, **named: engine)
        monkeypatch.setattr(module, "timed_steps", lambda engine, count, executed: executed.append(0.002) or 0.01)
    arrivals = SimpleNamespace(run=lambda count: (0.016, [264] * count))
    monkeypatch.setattr(mixed, "Arrivals", lambda *given: arrivals)
    monkeypatch.setattr(mixed, "first_token_seconds", lambda *given: 0.03)
    monkeypatch.setattr(engine_steps, "kernels_of", lambda call: SPANS)
    phases = {"exec to first token": 17.0, "first request once ready": 2.0, "later request": 0.05}
    monkeypatch.setattr(start, "start_seconds", lambda *given, **named: phases | {"engine: weights packed": 1.0})
    monkeypatch.setattr(start, "weights_from_a_file", lambda *given: None)
    monkeypatch.setattr(times, "flash_attention", lambda: lambda *given, **named: None)
    monkeypatch.setattr(times, "agree", lambda *given: None)
    monkeypatch.setattr(times.Bench, "__init__", lambda self, place: vars(self).update(here=place, **LLAMA_HEADS))
    monkeypatch.setattr(times.Bench, "micros", lambda self, name, make, num_bytes: 500.0)
    monkeypatch.setattr(times, "measurements", lambda: [times.unequal, times.prompts])
    return here


LLAMA_HEADS = {"heads": 32, "kv_heads": 8, "size": 128}
# It reads the card's memory itself, and has no other figure.
READS_THE_CARD = "memory"


@pytest.mark.slow
def test_predictions_name_rows_that_the_parts_write(on_a_card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {one.part for one in figures.PREDICTIONS}
    found = set()
    for part in named - {READS_THE_CARD}:
        monkeypatch.setattr(common, "place", lambda name: on_a_card)
        on_a_card.report._path.unlink(missing_ok=True)
        load_module(f"parts.{part}").main()
        found |= {(part, name) for name in rows(on_a_card)}
    wanted = {(one.part, one.name) for one in figures.PREDICTIONS if one.part != READS_THE_CARD}
    assert wanted - found == set()
    bounded = {(one.part, one.name + figures.SHARE) for one in figures.PREDICTIONS if one.shape is not None}
    assert bounded - found == set(), "and those with a floor have their share of it"
    (memory,) = (one for one in figures.PREDICTIONS if one.part == READS_THE_CARD)
    assert f'"{memory.name}"' in (ROOT / "tests/gpu/parts/memory.py").read_text()


def test_figures_that_the_parts_make_of_times(on_a_card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "place", lambda name: on_a_card)
    load_module("parts.mixed").main()
    load_module("parts.start").main()
    load_module("parts.attention_times").main()
    found = rows(on_a_card)
    assert found["decode, unequal contexts over equal ones"].value == 1.0
    products = floors.products_seconds(floors.LLAMA_8B_LONG.spec(), 200)
    ratio = found[f"{figures.ARRIVING}: over decode and the prompt's products"]
    assert ratio.value == pytest.approx(0.016 / (0.01 + products), rel=1e-3) and ratio.aim == 1.5
    assert found["8B, cold start: first request over later ones"].value == 40.0
    assert found["8B, warm start: exec to first token"].value == 17.0
    assert found["prompts, 1 x 8192: speed over FlashAttention-3"].value == 1.0


def test_flash_attention_is_held_against_the_same_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = load_module("parts.attention")
    case = attention.Case("small", (4, 2, 64), ((1, 1), (7, 9), (1, 40)), window=8, softcap=50.0)
    cases = [case, replace(case, name="fp8", has_fp8_cache=True), replace(case, name="ALiBi", has_alibi=True)]
    assert list(attention.flash_checks(torch.device("cpu"), cases)) == [], "no card"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention.flash_attention, "load_library", FlashLibrary)
    ((name, call, most),) = attention.flash_checks(torch.device("cpu"), cases)
    assert name == "FlashAttention-3, small" and 0 < call() < most
    wrong = FlashAttention(FlashLibrary())
    monkeypatch.setattr(attention.flash_attention, "offer", lambda features: {"paged_attention": partial(off, wrong)})
    assert next(iter(attention.flash_checks(torch.device("cpu"), cases)))[1]() > most


def off(paged_attention: Any, *arguments: Any, **how: Any) -> torch.Tensor:
    return paged_attention(*arguments, **how | {"scale": how["scale"] * 1.5})  # type: ignore[no-any-return]


def test_every_kernel_has_a_time(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the part as on a card, except for the times themselves."""
    bench = load_module("parts.bench")
    monkeypatch.setattr(common, "place", lambda name: here)
    monkeypatch.setattr(type(here), "device", "cpu")
    monkeypatch.setattr(bench.bench_gpu, "graph_us", lambda case: 100.0)
    monkeypatch.setattr(bench.bench_gpu, "measure_limits", lambda random: (4000.0, 8e5))
    timing = bench.bench_gpu.Timing(5.0, 1000, 0.0)
    monkeypatch.setattr(bench.bench_gpu, "sampling_times", lambda *given: {"sampling": timing})
    bench.main()
    found = rows(here)
    assert found["rms_norm bf16, 64 rows"].value == found["qkv bf16, 1 rows"].value == 100.0
    assert found["experts 8 of 128, 2048 x 768 bf16, 1024 rows"].value == 100.0
    assert found["torch grouped experts 8 of 128, 2048 x 768 bf16, 8192 rows"].value == 100.0
    assert found["sampling"].value == 5.0 and found["copy"].value == 4000.0 and len(found) > 90


def test_without_flash_attention_its_rows_say_why(on_a_card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = load_module("parts.attention_times")
    monkeypatch.setattr(times, "flash_attention", lambda: "vllm_fa3: no such package")
    times.prompts(times.Bench(on_a_card))
    assert rows(on_a_card)["prompts, 1 x 8192: FlashAttention-3"].value == "not run: vllm_fa3: no such package"


def test_attention_that_is_timed_computes_what_it_should(tiny: Any) -> None:
    """In Triton's interpreter with upper bounds on the host, as on a card, and with CPU kernels."""
    pytest.importorskip("triton")
    times = load_module("parts.attention_times")
    bench = times.Bench(tiny)
    contexts = [20, 40, 33]
    cache = bench.cache(times.blocks_of(contexts))
    for new in (1, 3):
        call = bench.paged(cache, new, contexts)
        wanted = call()
        count, told = len(contexts), ([max(contexts)] * len(contexts) if new == 1 else contexts)
        query, blocks, block_table, starts, _ = call.args
        assert query.shape == (count * new, 32, 128) and len(block_table.unique()) == len(cache)
        found = registry.with_triton(batch_invariant=False).paged_attention(
            query, blocks, block_table, starts, told, **call.keywords
        )
        assert load_module("parts.attention").difference(found, wanted) < 2e-2


def test_flash_attention_is_given_the_same_numbers(tiny: Any) -> None:
    times = load_module("parts.attention_times")

    def flash(query: Any, key: Any, value: Any, causal: bool) -> Any:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=causal, enable_gqa=True).transpose(1, 2)

    bench = times.Bench(tiny)
    times.agree(bench, flash)
    times.agree(bench, lambda query, key, value, causal: flash(query, key, value, causal) * 1.1)
    assert [row.passed for row in report.read_rows(tiny.report._path)] == [True, False]


def test_ranks_are_compared_where_each_has_a_gpu(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spread: list[tuple[Any, ...]] = []

    def make_engine(folder: Path, device: str) -> Any:
        assert device == "cuda"
        return make_cpu_engine(folder)

    def make_ranks(here: Any, folder: Path, *shape: Any) -> Any:
        spread.append(shape)
        if shape == (1, 2, "nccl"):
            raise RuntimeError("no NCCL")
        return make_cpu_engine(folder)

    make_cpu_engine = ranks.make_engine
    monkeypatch.setattr(ranks, "make_engine", make_engine)
    monkeypatch.setattr(ranks, "spread", make_ranks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks.compare_ranks(here, ranks.SHAPES)
    assert spread == [(2, 1, "nccl"), (1, 2, "nccl"), (2, 1, "symmetric")]
    found = {(row.name.partition(":")[0], row.passed, row.value) for row in rows(here).values()}
    assert found == {
        ("TP=2, PP=1, --all-reduce nccl", True, "ok"),
        ("TP=1, PP=2, --all-reduce nccl", False, "RuntimeError('no NCCL')"),
        ("TP=2, PP=2, --all-reduce nccl", None, "not run: it needs 4 GPUs, not 2"),
        ("TP=2, PP=1, --all-reduce symmetric", True, "ok"),
    }
