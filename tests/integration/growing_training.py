"""A DDP training with a sampler that loses a rank and gets another one: see `test_protect`.

    hora run -np 3 --min-np 2 --blacklist-cooldown-range 1 2 python growing_training.py FOLDER

It ends after the first epoch that a newcomer has trained in from its beginning.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hora.elastic

ROWS, BATCH, PAUSE_S = 94, 4, 0.05


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    worker = int(os.environ["HORA_WORKER"])
    dist.init_process_group("hora")
    torch.manual_seed(worker)  # the newcomer's own parameters are others
    net = torch.nn.Sequential(torch.nn.Linear(1, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 2))
    model = DistributedDataParallel(net, bucket_cap_mb=0.0005)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    data = torch.utils.data.TensorDataset(torch.arange(float(ROWS)).reshape(-1, 1))
    sampler = hora.elastic.ElasticSampler(data, seed=3)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
    hora.elastic.protect(model, optimizer, scheduler=scheduler, sampler=sampler)
    steps, first_epoch = [], sampler.epoch
    for epoch in range(first_epoch, 10**6):
        sampler.set_epoch(epoch)
        seen: list[float] = []
        for (rows,) in loader:
            time.sleep(PAUSE_S)
            optimizer.zero_grad()
            loss = (model(rows / ROWS) - 1).square().mean()
            if worker == 1 and epoch == 1 and len(seen) > 2 * BATCH:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            scheduler.step()
            seen += rows.flatten().tolist()
            steps.append((epoch, dist.get_world_size()))
        is_over = torch.tensor([worker > 2 and epoch > first_epoch])
        dist.all_reduce(is_over, op=dist.ReduceOp.MAX)
        if is_over.item():
            break
    found = {"steps": steps, "seen": seen, "rate": scheduler.get_last_lr(), "size": dist.get_world_size()}
    found["parameters"] = [p.detach().clone() for p in net.parameters()]
    found["optimizer"] = [value for item in optimizer.state_dict()["state"].values() for value in item.values()]
    torch.save(found, folder / f"{worker}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
