"""Row kernels: equal to their definitions, and a row's bits do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from reference import activation as activation_definition
from reference import linear as linear_definition
from reference import linear_int8 as linear_int8_definition
from reference import norm as norm_definition
from reference import rope as rope_definition
from serve_llm.kernels import activation, linear, linear_int8, norm, rope

DTYPES = [torch.float32, torch.bfloat16]
MAX_ROWS = 300
SHAPES = [(97, 53), (896, 4864), (1000, 2048), (130, 33), (331, 60), (84, 19), (7, 1), (1, 7)]  # outputs, inputs
ROWS = [*range(1, 18), 31, 32, 33, 64, 65, 128, 255, 256]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_alone(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Check that rows computed in groups of any size, at any place, have the bits of rows computed all at once."""
    whole = function(x)
    for count in ROWS:
        first = 7 * count % (len(x) - count + 1)
        part = function(x[first : first + count].clone())
        assert torch.equal(part, whole[first : first + count]), f"{count} rows"


def assert_equal(ours: Tensor, definition: Tensor) -> None:
    assert ours.dtype == definition.dtype and ours.shape == definition.shape
    bf16 = ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, definition, atol=2e-2 if bf16 else 1e-5, rtol=2e-2 if bf16 else 1e-5)


class TestLinear:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_rows_alone(self, shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
        layer = linear.pack(random(*shape, dtype=dtype), random(shape[0], dtype=dtype))
        assert_rows_alone(layer, random(MAX_ROWS, shape[1], dtype=dtype, seed=1))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_rows_alone_without_onednn(
        self, shape: tuple[int, int], dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(linear, "_onednn_works", lambda dtype: False)
        layer = linear.pack(random(*shape, dtype=dtype), random(shape[0], dtype=dtype))
        assert_rows_alone(layer, random(MAX_ROWS, shape[1], dtype=dtype, seed=1))

    @pytest.mark.parametrize("with_bias", [True, False])
    @pytest.mark.parametrize("onednn", [True, False])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_equals_the_definition(
        self, dtype: torch.dtype, onednn: bool, with_bias: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not onednn:
            monkeypatch.setattr(linear, "_onednn_works", lambda dtype: False)
        weight, bias = random(97, 53, dtype=dtype), random(97, dtype=dtype) if with_bias else None
        x = random(5, 53, dtype=dtype, seed=1)
        assert_equal(linear.pack(weight, bias)(x), linear_definition.pack(weight, bias)(x))

    def test_no_rows(self) -> None:
        assert linear.pack(random(97, 53), random(97))(torch.empty(0, 53)).shape == (0, 97)

    def test_weight_in_any_layout(self) -> None:
        weight, x = random(53, 97).T, random(3, 53)
        assert_equal(linear.pack(weight)(x), linear_definition.pack(weight)(x))


class TestLinearInt8:
    @staticmethod
    def weights(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        numbers = torch.randint(-127, 128, (outputs, inputs), generator=torch.Generator().manual_seed(3))
        return numbers.to(torch.int8), random(outputs, 1, seed=4).abs() / 100

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_rows_alone(self, shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
        layer = linear_int8.pack_int8(*self.weights(*shape), random(shape[0], dtype=dtype))
        assert_rows_alone(layer, random(MAX_ROWS, shape[1], dtype=dtype, seed=1))

    @pytest.mark.parametrize("with_bias", [True, False])
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_equals_the_definition(self, dtype: torch.dtype, shape: tuple[int, int], with_bias: bool) -> None:
        weight, scale = self.weights(*shape)
        bias = random(shape[0], dtype=dtype) if with_bias else None
        x = random(MAX_ROWS, shape[1], dtype=dtype, seed=1) * torch.logspace(-30, 30, MAX_ROWS)[:, None].to(dtype)
        ours = linear_int8.pack_int8(weight, scale, bias)(x)
        definition = linear_int8_definition.pack_int8(weight, scale, bias)(x)
        size = definition.float().abs().amax(1, keepdim=True)
        assert ours.dtype == dtype
        error = (ours.float() - definition.float()) / size
        assert error.abs().max() < (1e-6 if dtype == torch.float32 else 8e-3)  # here: equal to the last bit

    def test_a_row_of_whole_numbers_is_exact(self) -> None:
        weight, scale = self.weights(331, 97)
        x = torch.randint(-127, 128, (9, 97), generator=torch.Generator().manual_seed(5)).float()
        x[:, 0] = 127.0
        assert torch.equal(linear_int8.pack_int8(weight, scale)(x), x @ weight.float().T * scale.T)

    def test_zeros_and_what_is_not_finite(self) -> None:
        weight, scale = self.weights(97, 53)
        bias = random(97)
        x = random(5, 53, seed=1)
        x[1], x[2, 7], x[3, 9], x[4] = 0.0, torch.nan, torch.inf, 1e-38
        layer = linear_int8.pack_int8(weight, scale, bias)
        y = layer(x)
        assert torch.equal(y[0], layer(x[:1])[0]) and torch.equal(y[1], bias) and torch.equal(y[4], bias)
        assert not y[2:4].isfinite().any()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_nothing(self, dtype: torch.dtype) -> None:
        none = torch.empty(97, 0, dtype=torch.int8)
        bias = random(97, dtype=dtype)
        assert torch.equal(
            linear_int8.pack_int8(none, torch.zeros(97, 1), bias)(bias.new_empty(2, 0)), bias.expand(2, 97)
        )
        assert linear_int8.pack_int8(*self.weights(97, 53))(bias.new_empty(0, 53)).shape == (0, 97)
        assert linear_int8.pack_int8(*self.weights(0, 53))(bias.new_empty(2, 53)).shape == (2, 0)

    def test_processors_that_saturate_are_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        product = linear_int8._multiply_by_onednn
        clamped = lambda *operands: product(*operands).clamp(-(2.0**15), 2.0**15)  # noqa: E731
        monkeypatch.setattr(linear_int8, "_multiply_by_onednn", clamped)
        assert not linear_int8.is_onednn_exact.__wrapped__()

    def test_same_bits_without_onednn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weight, scale = self.weights(1100, 97)
        x = random(9, 97, seed=1)
        expected = linear_int8_definition.pack_int8(weight, scale)(x)
        monkeypatch.setattr(linear_int8, "is_onednn_exact", lambda: False)
        torch.testing.assert_close(linear_int8.pack_int8(weight, scale)(x), expected, rtol=1e-6, atol=1e-6)


class TestNorm:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", [14, 97, 896])
    def test_rms_norm(self, width: int, dtype: torch.dtype, threads: int) -> None:
        weight = random(width, dtype=dtype, seed=1) + 1
        x = random(MAX_ROWS, width, dtype=dtype) * 3
        assert_equal(norm.rms_norm(x, weight, 1e-6), norm_definition.rms_norm(x, weight, 1e-6))
        assert_rows_alone(lambda rows: norm.rms_norm(rows, weight, 1e-6), x)

    def test_a_weight_in_float32_is_rounded_once(self) -> None:
        weight, x = random(97, seed=1) + 1, random(MAX_ROWS, 97, dtype=torch.bfloat16)
        ours, definition = norm.rms_norm(x, weight, 1e-6), norm_definition.rms_norm(x, weight, 1e-6)
        assert ours.dtype == torch.bfloat16 and (ours != definition).float().mean() < 0.001
        assert_rows_alone(lambda rows: norm.rms_norm(rows, weight, 1e-6), x)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rms_norm_of_heads(self, dtype: torch.dtype) -> None:
        weight, x = random(14, dtype=dtype), random(MAX_ROWS, 3, 14, dtype=dtype)
        assert_equal(norm.rms_norm(x, weight, 1e-6), norm_definition.rms_norm(x, weight, 1e-6))
        assert_rows_alone(lambda rows: norm.rms_norm(rows, weight, 1e-6), x)

    @pytest.mark.parametrize("affine", [True, False])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", [57, 768])
    def test_layer_norm(self, width: int, dtype: torch.dtype, affine: bool, threads: int) -> None:
        weight = random(width, dtype=dtype, seed=1) + 1 if affine else None
        bias = random(width, dtype=dtype, seed=2) if affine else None
        x = random(MAX_ROWS, width, dtype=dtype) * 3 + 1
        assert_equal(norm.layer_norm(x, weight, bias, 1e-5), norm_definition.layer_norm(x, weight, bias, 1e-5))
        assert_rows_alone(lambda rows: norm.layer_norm(rows, weight, bias, 1e-5), x)


class TestRope:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head_dim", [2, 14, 64])
    def test_apply_rope(self, head_dim: int, dtype: torch.dtype, threads: int) -> None:
        query = random(MAX_ROWS, 6, head_dim, dtype=dtype)
        key = random(MAX_ROWS, 3, head_dim, dtype=dtype, seed=1)
        angle = random(MAX_ROWS, head_dim // 2, seed=2) * 3
        ours = rope.apply_rope(query, key, angle.cos(), angle.sin())
        theirs = rope_definition.apply_rope(query, key, angle.cos(), angle.sin())
        for left, right in zip(ours, theirs, strict=True):
            assert_equal(left, right)

        def both(rows: Tensor) -> Tensor:
            q, k, a = rows.split([6, 3, 1], 1)
            angles = a[:, 0, : head_dim // 2].float()
            return torch.cat(rope.apply_rope(q, k, angles.cos(), angles.sin()), 1)

        padded = torch.nn.functional.pad(angle, (0, head_dim - head_dim // 2)).to(dtype)
        assert_rows_alone(both, torch.cat((query, key, padded[:, None]), 1))


class TestActivation:
    @pytest.mark.parametrize(
        "name",
        [
            "silu_and_mul",
            "gelu_and_mul",
            "gelu_tanh_and_mul",
            "gelu",
            "gelu_tanh",
            "relu",
            "relu2",
            "swigluoai_and_mul",
        ],
    )
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", [2, 194, 2048])
    def test_activation(self, name: str, width: int, dtype: torch.dtype, threads: int) -> None:
        x = random(MAX_ROWS, width, dtype=dtype) * 4
        function = getattr(activation, name)
        assert_equal(function(x), getattr(activation_definition, name)(x))
        assert_rows_alone(function, x)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_far_out(self, dtype: torch.dtype) -> None:
        x = torch.tensor([[-1000.0, -100.0, 0.0, 100.0, 1000.0]], dtype=dtype)
        for function in (activation.gelu, activation.gelu_tanh, activation.relu):
            assert function(x).tolist() == x.clamp(min=0).tolist()
        assert activation.silu_and_mul(torch.cat((x, torch.ones_like(x)), -1)).tolist() == x.clamp(min=0).tolist()
        clamped = activation.swigluoai_and_mul(torch.cat((x, x), -1)).tolist()[0]
        assert clamped == pytest.approx([0.0, 0.0, 0.0, 56.0, 56.0], abs=0.001)  # (7 + 1) * 7, times a sigmoid


def test_few_sizes_of_rows_reach_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = linear.pack(torch.eye(32))
    reached: set[int] = set()
    whole = linear.with_rows
    monkeypatch.setattr(linear, "with_rows", lambda x, rows: (reached.add(rows), whole(x, rows))[1])
    for rows in range(1, 1200):
        x = torch.arange(rows * 32, dtype=torch.float32).view(rows, 32)
        assert torch.equal(packed(x), x)
    assert len(reached) <= 15
    assert all(rows <= linear.few_sizes(rows) <= max(1.5 * rows, 2) for rows in range(1, linear.MAX_ROWS + 1))
