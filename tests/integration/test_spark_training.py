"""The same training on Spark tasks, on local processes and under horovodrun is bit-identical."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from sparkdl import HorovodRunner

pytestmark = pytest.mark.spark

TRAINING = '''
def train(epochs):
    """A small network on data that differs by rank; the final parameters and every loss."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)  # sums in another order are other bits, and launchers share out cores differently
    torch.manual_seed(hvd.rank())
    x = torch.randn(64, 8)
    y = (x.sum(1, keepdim=True) > 0).float()
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(hvd.allreduce(loss.detach(), name="loss")))
    return net.state_dict(), losses
'''

SCRIPT = TRAINING + textwrap.dedent("""
    import sys
    import torch
    import horovod.torch as hvd

    result = train(5)
    if hvd.rank() == 0:
        torch.save(result, sys.argv[1])
""")


def test_spark_local_processes_and_horovodrun_are_bit_identical(spark, tmp_path):
    namespace = {"__name__": "__main__"}
    exec(TRAINING, namespace)
    on_spark = HorovodRunner(np=2).run(namespace["train"], epochs=5)
    local = HorovodRunner(np=-2).run(namespace["train"], epochs=5)
    (tmp_path / "train.py").write_text(SCRIPT)
    subprocess.run(
        [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable, "train.py", "result.pt"],
        cwd=tmp_path,
        check=True,
        timeout=280,
    )
    under_horovodrun = torch.load(tmp_path / "result.pt")
    assert on_spark[1] == local[1] == under_horovodrun[1]
    assert on_spark[1][-1] < on_spark[1][0]
    for name, tensor in on_spark[0].items():
        assert torch.equal(tensor, local[0][name])
        assert torch.equal(tensor, under_horovodrun[0][name])
