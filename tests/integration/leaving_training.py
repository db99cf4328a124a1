"""Training interrupted by a scheduler: `python leaving_training.py FOLDER STEPS`. Commits to disk every step."""

from __future__ import annotations

import sys
import time

import torch

import horovod.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 1)
state = hvd.elastic.TorchState(model=model, step=0)
resumed = state.persist(sys.argv[1])
if hvd.rank() == 0:
    print("resumed" if resumed else "begins", "at step", state.step, flush=True)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.step < int(sys.argv[2]):
        hvd.allreduce(torch.ones(1), name="step")
        state.step += 1
        if hvd.rank() == 0:
            print("step", state.step, "of", hvd.size(), flush=True)
        time.sleep(0.1)  # stands in for computation
        state.commit()


train(state)
print("done", hvd.rank(), flush=True)
