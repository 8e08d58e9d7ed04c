"""The self-check finds layers whose rows depend on other rows, and corrects them."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from serve_llm.kernels.invariance import BatchInvarianceChecker, LayerKind, PaddedLinear, differing_sizes

WEIGHT = torch.randn((24, 40), generator=torch.Generator().manual_seed(1))
PRODUCT = LayerKind("a fake", 24, 40, torch.float32)


def right(x: Tensor) -> Tensor:
    return (x[:, None] * WEIGHT).sum(-1)


def another_way_for_few(x: Tensor) -> Tensor:
    """Use other code for few rows, which adds in a different order, as libraries do."""
    return right(x) if len(x) > 3 else (x[:, None] * WEIGHT).view(len(x), 24, 2, 20).sum(-1).sum(-1)


def another_way_for_the_last(x: Tensor) -> Tensor:
    """Use other code for rows after the last whole pair, for any number of rows."""
    y = right(x)
    if len(x) % 2:
        y[-1] = another_way_for_few(x[-1:])[0]
    return y


def by_company(x: Tensor) -> Tensor:
    """Depend on all rows, so that only a single row is safe."""
    return right(x) + x.abs().sum() * 1e-3


def make_invariant(layer: object, caplog: pytest.LogCaptureFixture) -> tuple[object, list[str]]:
    caplog.set_level(logging.WARNING)
    caplog.clear()
    return BatchInvarianceChecker().make_invariant(layer, PRODUCT), list(caplog.messages)  # type: ignore[arg-type]


def test_a_right_layer_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    assert make_invariant(right, caplog) == (right, [])
    assert make_invariant(PaddedLinear(another_way_for_few, 8), caplog)[1] == []


@pytest.mark.parametrize("fake", [another_way_for_few, another_way_for_the_last])
def test_a_fake_kernel_is_caught(fake: object, caplog: pytest.LogCaptureFixture) -> None:
    layer, messages = make_invariant(fake, caplog)
    assert isinstance(layer, PaddedLinear) and layer.rows == 32
    (line,) = messages
    assert "24 x 40 in float32 by a fake" in line and "32 rows at a time" in line
    assert differing_sizes(layer, PRODUCT, 100) == []
    x = torch.randn((77, 40))
    torch.testing.assert_close(layer(x), right(x))
    assert layer(x[:0]).shape == (0, 24)


def test_where_no_number_is_safe_rows_come_alone(caplog: pytest.LogCaptureFixture) -> None:
    layer, messages = make_invariant(by_company, caplog)
    assert isinstance(layer, PaddedLinear) and layer.rows == 1
    assert "row by row" in messages[0]
    x = torch.randn((5, 40))
    assert torch.equal(layer(x), torch.cat([by_company(row[None]) for row in x]))


def test_one_product_is_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    checker, calls = BatchInvarianceChecker(), []

    def counted(x: Tensor) -> Tensor:
        calls.append(len(x))
        return another_way_for_few(x)

    first = checker.make_invariant(counted, PRODUCT)
    tried = len(calls)
    second = checker.make_invariant(counted, PRODUCT)
    assert tried and len(calls) == tried and len(caplog.messages) == 1
    assert isinstance(first, PaddedLinear) and isinstance(second, PaddedLinear)
    assert checker.make_invariant(right, LayerKind("another", 24, 40, torch.float32)) is right


def test_layers_of_nothing_are_not_tried() -> None:
    layer = BatchInvarianceChecker().make_invariant(torch.nn.Identity(), LayerKind("none", 0, 5, torch.float32))
    assert isinstance(layer, torch.nn.Identity)
