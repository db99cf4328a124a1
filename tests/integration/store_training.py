"""Training for jobs whose leaders die: every rank records its pid, each step and the size of the world.

`python store_training.py FOLDER`; it ends when FOLDER contains a file `stop`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import horovod.torch as hvd


def main(folder: Path) -> None:
    hvd.init()
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters())
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, step=0, per_step=True)
    notes = (folder / f"worker.{os.environ['HORA_WORKER']}").open("a", buffering=1)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        asked = 0.0
        while not asked:
            optimizer.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.step += 1
            notes.write(f"{os.getpid()} {state.step} {hvd.size()}\n")
            if hvd.rank() == 0 and state.step % 10 == 0:
                print("step", state.step, flush=True)
            asked = hvd.allreduce(torch.tensor(float((folder / "stop").exists())), op=hvd.Max, name="stop").item()
            state.commit()
            time.sleep(0.05)

    train(state)
    print("rank", hvd.rank(), "has finished at step", state.step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
