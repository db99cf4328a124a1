"""Training for tests of the live page: every step takes 50 ms; a rank can be slow, hang, or print HTML.

Files in the folder ORDERS control it, so that one job can serve all tests: `slow` and `hang` contain a rank.
STEPS: the number of steps; ELASTIC=1: run as an elastic job.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

import hora
import horovod.torch as hvd

STEPS = int(os.environ.get("STEPS", "20000"))
ORDERS = Path(os.environ["ORDERS"])
WORK_S = 0.05


def is_ordered(what: str) -> bool:
    """Return whether this rank has to do it now."""
    path = ORDERS / what
    return path.exists() and path.read_text() == str(hvd.rank())


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 8 == 0 and is_ordered("slow"):
            time.sleep(0.2 * WORK_S)  # a disk slower than the others' makes the rank a fifth of a step late
        return torch.ones(64)


def hang_if_asked() -> None:
    while is_ordered("hang"):
        time.sleep(0.2)  # the guilty line


def train(state: hvd.elastic.TorchState | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step, batch in enumerate(torch.utils.data.DataLoader(Data(), batch_size=8)):
        optimizer.zero_grad()
        time.sleep(WORK_S)
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        hora.report(loss=loss)
        hang_if_asked()
        if step % 20 == 0 and hvd.rank() == 0:
            print(
                f"step {step} <img src=x onerror=document.title='taken'><script>document.title='taken'</script>",
                flush=True,
            )
        if state is not None and step % 10 == 0:
            state.commit()


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.001), named_parameters=model.named_parameters()
    )
    if os.environ.get("ELASTIC"):
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
        state.persist(ORDERS / "commits")
        hvd.elastic.run(lambda state: train(state, model, optimizer))(state)
    else:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train(None, model, optimizer)


if __name__ == "__main__":
    main()
