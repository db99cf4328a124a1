"""A DDP training in a function that `hora.elastic.run` calls again: see `test_protect`.

hora run -np 3 --min-np 2 --spares 1 python run_with_ddp.py FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hora.elastic


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("hora")
    worker = os.environ["HORA_WORKER"]
    torch.manual_seed(int(worker))
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    state = hora.elastic.TorchState(model=net, optimizer=optimizer, step=0, steps_of_all=0)
    steps: list[tuple[int, int]] = []

    @hora.elastic.run
    def train(state: hora.elastic.TorchState) -> None:
        model = DistributedDataParallel(net)
        while state.steps_of_all < 3:  # since a newcomer has come
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            if worker == "1" and state.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            state.step += 1
            state.steps_of_all += state.step > 6 and dist.get_world_size() == 3
            steps.append((state.step, dist.get_world_size()))
            state.commit()

    train(state)
    momenta = [item["exp_avg"] for item in optimizer.state_dict()["state"].values()]
    torch.save({"steps": steps, "values": [*net.parameters(), *momenta]}, folder / f"{worker}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
