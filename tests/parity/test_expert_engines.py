"""Engines that share experts give the tokens of one engine with as many ranks, to the last bit of logprobs, whether the
other engines compute something else or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.common.types import EngineCoreRequest
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.model.expert_placement import Placement, balance
from serve_llm.engine.worker import expert_balancer
from serve_llm.kernels.cpu import library
from support.engine import Result, generate, generate_together, greedy, make_engine, make_engines
from support.matrix import FEW, mostly_slow
from support.tiny import WITH_EXPERTS, make_checkpoint

ENGINE_GRIDS = [(2, 1), (3, 1), (2, 2)]  # engines x tensor-parallel ranks of each; layers have 5 experts
STAGE_GRIDS = [(2, 1, 2), (3, 1, 2), (2, 2, 2)]  # engines x tensor-parallel ranks x pipeline stages of each
PROMPTS = [[7 * number + place for place in range(1 + 9 * number)] for number in range(5)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def requests(numbers: range) -> list[EngineCoreRequest]:
    sampling = [{}, {"temperature": 0.9, "seed": 5}, {"prompt_logprobs": 1}, {"logprobs": 2}, {}]
    return [greedy(number, PROMPTS[number], 5, **({"logprobs": 0} | sampling[number])) for number in numbers]


@lru_cache(maxsize=4)
def alone(directory: Path, family: str, tensor: int) -> dict[int, Result]:
    if not directory.exists():
        make_checkpoint(directory, family)
    how = {"enable_expert_parallel": True, "tensor_parallel_size": tensor} if tensor > 1 else {}
    return generate(make_engine(directory, block_size=8, tensor=tensor, **how), requests(range(5)))


def same(found: dict[int, Result], expected: dict[int, Result]) -> None:
    for number, result in found.items():
        one = expected[number]
        assert (result.token_ids, result.logprobs, result.prompt_logprobs) == (
            one.token_ids,
            one.logprobs,
            one.prompt_logprobs,
        )


@pytest.mark.pairs("logprobs + EP", "DP + EP")
@pytest.mark.parametrize(("engines", "tensor"), mostly_slow(ENGINE_GRIDS, [(2, 1), (2, 2)]))
@pytest.mark.parametrize("family", mostly_slow(WITH_EXPERTS, [*FEW, "qwen3_next"]))
def test_as_one_engine(family: str, engines: int, tensor: int, root: Path, tmp_path: Path) -> None:
    expected = alone(root / family, family, tensor)
    made = make_engines(root / family, tmp_path, engines, tensor, block_size=8)
    shares = [requests(range(index, 5, engines)) for index in range(engines)]
    for found in generate_together(made, shares):
        same(found, expected)


@pytest.mark.parametrize(("engines", "tensor", "pipeline"), mostly_slow(STAGE_GRIDS, [(2, 1, 2), (2, 2, 2)]))
@pytest.mark.parametrize("family", mostly_slow(WITH_EXPERTS, ["mixtral", "deepseek_v3"]))
def test_each_engine_in_stages(
    family: str, engines: int, tensor: int, pipeline: int, root: Path, tmp_path: Path
) -> None:
    expected = alone(root / family, family, tensor)
    made = make_engines(root / family, tmp_path, engines, tensor, pipeline, block_size=8)
    shares = [requests(range(index, 5, engines)) for index in range(engines)]
    for found in generate_together(made, shares):
        same(found, expected)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_one_engine_works_and_the_others_hold_experts(pipeline: int, root: Path, tmp_path: Path) -> None:
    expected = alone(root / "qwen3_moe", "qwen3_moe", 1)
    made = make_engines(root / "qwen3_moe", tmp_path, 3, 1, pipeline, block_size=8, max_num_batched_tokens=8)
    for found in generate_together(made, [[], requests(range(5)), []]):
        same(found, expected)


def test_more_engines_than_experts(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    make_checkpoint(directory, "mixtral", num_local_experts=2)
    expected = generate(make_engine(directory, block_size=8), requests(range(5)))
    made = make_engines(directory, tmp_path, 3, block_size=8)
    for found in generate_together(made, [requests(range(2, 5)), [], requests(range(2))]):
        same(found, expected)


class Moves:
    """Shifts the load to the experts of rank 0 without copies, so that some experts move in any case."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []  # as counted by the ranks
        self.num_moved: list[int] = []  # slots that got another expert; all ranks of a group agree

    def balance(self, placement: Placement, rows: Sequence[int], first: int) -> Placement:
        self.num_rows.append(sum(rows))
        once = [expert for expert, copies in Counter(chain(*placement)).items() if copies == 1]
        busy = {expert - first for expert in placement[0] if expert in once}
        skewed = [100 if index in busy else 1 for index in range(len(rows))]
        after = balance(placement, skewed, first)
        self.num_moved.append(sum(old != new for old, new in zip(chain(*placement), chain(*after), strict=True)))
        return after

    def check(self, engines: Sequence[EngineCore]) -> None:
        """Check that experts moved, and that the engines' stats report how many."""
        assert sum(self.num_rows) > 0
        stats = [engine._executor.eplb_stats for engine in engines]
        placements = [1 for number in self.num_moved if number]
        assert placements
        assert [one.num_placements * len(engines) for one in stats] == [len(placements)] * len(engines)
        assert sum(one.num_moved for one in stats) * len(engines) == sum(self.num_moved)
        sizes = {one.moved_bytes / one.num_moved for one in stats if one.num_moved}
        assert len(sizes) == 1 and min(sizes) > 0
        rows = {(one.mean_rows, one.busiest_rows, one.busiest_rows_after) for one in stats}
        assert len(rows) == 1, "all engines know the rows of all ranks"
        mean, busiest, busiest_after = rows.pop()
        assert 0 < mean <= min(busiest, busiest_after)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    made = Moves()
    monkeypatch.setattr(expert_balancer, "balance", made.balance)
    return made


def eplb(num_redundant: int) -> dict[str, object]:
    return {"enable_eplb": True, "eplb_config": {"step_interval": 3, "num_redundant_experts": num_redundant}}


@pytest.mark.parametrize(
    ("engines", "tensor", "pipeline"), mostly_slow([(2, 1, 1), *STAGE_GRIDS], [(2, 1, 1), (2, 1, 2)])
)
@pytest.mark.parametrize("family", mostly_slow(WITH_EXPERTS, ["qwen3_moe"]))
@pytest.mark.parametrize("num_redundant", [0, 2])
def test_experts_that_move(
    num_redundant: int,
    family: str,
    engines: int,
    tensor: int,
    pipeline: int,
    root: Path,
    tmp_path: Path,
    moves: Moves,
) -> None:
    expected = alone(root / family, family, tensor)
    made = make_engines(root / family, tmp_path, engines, tensor, pipeline, block_size=8, **eplb(num_redundant))
    shares = [requests(range(index, 5, engines)) for index in range(engines)]
    for found in generate_together(made, shares):
        same(found, expected)
    moves.check(made)


@pytest.mark.parametrize(
    "how", [{"quantization": "int8"}, {"quantization": "int4"}, {"quantization": "fp8"}, {"dtype": "bfloat16"}]
)
def test_experts_that_move_in_other_forms(how: dict[str, str], tmp_path: Path, moves: Moves) -> None:
    directory = tmp_path / "model"
    make_checkpoint(directory, "gpt_oss" if how == {"dtype": "bfloat16"} else "qwen3_moe")
    expected = generate(make_engine(directory, block_size=8, **how), requests(range(5)))
    made = make_engines(directory, tmp_path, 2, block_size=8, **how, **eplb(2))
    for found in generate_together(made, [requests(range(3)), requests(range(3, 5))]):
        same(found, expected)
    moves.check(made)


def test_experts_that_move_beside_drafts_and_offloaded_blocks(tmp_path: Path, moves: Moves) -> None:
    directory = tmp_path / "model"
    make_checkpoint(directory, "qwen3_moe")
    expected = generate(make_engine(directory, block_size=8), requests(range(5)))
    more = {"speculative_config": {"method": "ngram"}, "kv_offload_memory": "16MiB"}
    made = make_engines(directory, tmp_path, 2, block_size=8, **more, **eplb(2))
    for found in generate_together(made, [requests(range(3)), requests(range(3, 5))]):
        same(found, expected)
    moves.check(made)


def test_too_many_redundant_experts(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    make_checkpoint(directory, "qwen3_moe")
    with pytest.raises(
        OptionError, match=r"num_redundant_experts 6 is too many: the engines' tensor-parallel ranks 0 sh"
    ):
        make_engines(directory, tmp_path, 2, **eplb(6))
    with pytest.raises(OptionError, match=r"tensor-parallel ranks 1 share 1 experts, and one would hold some of them"):
        make_engines(directory, tmp_path, 2, 2, tensor_parallel_split="4,1", **eplb(4))


def test_without_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "model"
    make_checkpoint(directory, "qwen3_moe")
    monkeypatch.setattr(library, "find", lambda: None)
    with pytest.raises(OptionError, match=r"^--enable-eplb needs the compiled kernels on CPUs"):
        make_engines(directory, tmp_path, 2, **eplb(0))
