"""SyncBatchNorm equals BatchNorm over the combined batch: outputs, gradients and running statistics."""

from __future__ import annotations

import pytest
import torch
from hvd_session import assert_same_everywhere, raises, session
from torch import nn

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(1, 2, 4)

SHAPES = {2: (), 3: (6,), 4: (3, 5), 5: (2, 3, 2)}
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def data(dims: int, rows: list[int], dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dims)
    return [torch.randn(n, 4, *SHAPES[dims], generator=generator).to(dtype) * 2 + 3 for n in rows]


def compare(dims: int, rows: list[int], steps: int = 2, dtype=torch.float64, tolerance=1e-6, **options) -> None:
    ours, plain = hvd.SyncBatchNorm(4, **options).to(dtype), PLAIN[dims](4, **options).to(dtype)
    for layer in (ours, plain):
        if layer.weight is not None:
            with torch.no_grad():
                layer.weight.copy_(torch.tensor([0.5, 1.0, -2.0, 3.0]))
                layer.bias.copy_(torch.tensor([1.0, 0.0, -1.0, 2.0]))
    parts = data(dims, rows, dtype)
    factors = [torch.cos(part) for part in parts]
    begin, end = sum(rows[: hvd.rank()]), sum(rows[: hvd.rank() + 1])
    for _ in range(steps):
        mine, whole = parts[hvd.rank()].clone().requires_grad_(), torch.cat(parts).requires_grad_()
        output, wanted = ours(mine), plain(whole)
        torch.testing.assert_close(output, wanted[begin:end], rtol=tolerance, atol=tolerance)
        (output * factors[hvd.rank()]).sum().backward()
        (wanted * torch.cat(factors)).sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad[begin:end], rtol=tolerance, atol=tolerance)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], buffer, rtol=tolerance, atol=tolerance)
    if plain.weight is not None:
        for got, want in ((ours.weight.grad, plain.weight.grad), (ours.bias.grad, plain.bias.grad)):
            torch.testing.assert_close(hvd.allreduce(got, op=hvd.Sum), want, rtol=tolerance, atol=tolerance)
    assert_same_everywhere([buffer for _, buffer in ours.named_buffers()])


@session
def test_equals_batch_norm_over_the_combined_batch():
    for dims in SHAPES:
        compare(dims, [3] * hvd.size())
    compare(2, [5] * hvd.size(), dtype=torch.float32, tolerance=1e-5)
    compare(4, [2] * hvd.size(), affine=False)
    compare(4, [2] * hvd.size(), track_running_stats=False)
    compare(4, [2] * hvd.size(), momentum=None, steps=3)


@session
def test_ranks_may_have_different_numbers_of_rows_or_none():
    compare(4, [rank + 1 for rank in range(hvd.size())])
    if hvd.size() > 1:
        compare(2, [0, *[3] * (hvd.size() - 1)])


@session
def test_evaluation_uses_the_running_statistics():
    ours, plain = hvd.SyncBatchNorm(4), nn.BatchNorm1d(4)
    whole = torch.cat(data(2, [4] * hvd.size()))
    ours(whole[4 * hvd.rank() : 4 * hvd.rank() + 4])
    plain(whole)
    ours.eval()
    plain.eval()
    x = data(2, [7])[0]
    torch.testing.assert_close(ours(x), plain(x))
    assert ours.num_batches_tracked == 1


@session
def test_half_precision_input_and_wrong_dimensions():
    x = data(4, [4] * hvd.size(), torch.bfloat16)[hvd.rank()].requires_grad_()
    layer = hvd.SyncBatchNorm(4)
    output = layer(x)
    output.float().sum().backward()
    assert output.dtype == x.grad.dtype == torch.bfloat16
    with raises(ValueError, "at least 2D"):
        layer(torch.ones(4))


@session
def test_inside_a_distributed_optimizer():
    """The gradients of neighbouring layers are reduced while the layer itself communicates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), hvd.SyncBatchNorm(8), nn.ReLU(), nn.Linear(8, 2)).double()
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(single.parameters(), lr=0.1)
    parts = data(2, [3] * hvd.size(), torch.float64)
    for _ in range(4):
        for net, opt, x in ((model, optimizer, parts[hvd.rank()]), (single, plain, torch.cat(parts))):
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
    for a, b in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
