"""The check for non-finite gradients: findings, names, and values that it ignores."""

from __future__ import annotations

import math

import pytest
import torch

from hora.torch.norms import check_finite


def parameters(*gradients: torch.Tensor | None) -> dict[torch.Tensor, str]:
    """Return parameters with these gradients, named p0, p1, …"""
    named = {}
    for number, gradient in enumerate(gradients):
        shape, dtype = (
            (3,) if gradient is None else gradient.shape,
            torch.float32 if gradient is None else gradient.dtype,
        )
        parameter = torch.zeros(shape, dtype=dtype, requires_grad=True)
        parameter.grad = gradient
        named[parameter] = f"p{number}"
    return named


def test_finite_gradients_of_any_kind_and_size_pass():
    named = parameters(
        torch.tensor([3e38, -3e38]),  # their squares overflow
        torch.full((2,), 65504.0, dtype=torch.float16),
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.full((2,), 1e300, dtype=torch.float64),
        torch.zeros(0),
        torch.zeros(4, 3).to_sparse(1),
        torch.sparse_coo_tensor([[1, 1]], [[1.0, 2.0], [3.0, 4.0]], (4, 2), check_invariants=True),
        None,
    )
    check_finite([(name, parameter.grad) for parameter, name in named.items()], rank=0)
    check_finite([], rank=0)


@pytest.mark.parametrize(
    ("gradient", "found"),
    [
        (torch.tensor([1.0, math.nan, 2.0]), "1 NaN and 0 infinite of 3"),
        (torch.tensor([[-math.inf, math.nan], [math.inf, 0.0]]), "1 NaN and 2 infinite of 4"),
        (torch.tensor([math.nan, 1.0], dtype=torch.bfloat16), "1 NaN and 0 infinite of 2"),
        (torch.sparse_coo_tensor([[1, 1]], [math.inf, 3.0], (4,), check_invariants=True), "0 NaN and 1 infinite of 1"),
    ],
)
def test_a_non_finite_gradient_is_named(gradient, found):
    named = parameters(torch.ones(5), gradient, torch.tensor([math.nan], dtype=torch.float64))
    with pytest.raises(FloatingPointError, match=rf"the gradient of p1 on rank 3 has {found} values, in step \d+"):
        check_finite([(name, parameter.grad) for parameter, name in named.items()], rank=3)
