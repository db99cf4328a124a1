"""DDP that goes on when ranks die: each death costs some milliseconds, and no step.

hora run -np 4 --min-np 2 python examples/ddp_elastic.py
hora run -np 2 --min-np 1 python examples/ddp_elastic.py --kill-rank 1 --at-step 20
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hora.elastic


def quarters_of_a_plane(num_samples: int) -> TensorDataset:
    """Return random points of a plane, labelled with their quarter."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(num_samples, 2, generator=generator) * 2 - 1
    quarters = (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long()
    return TensorDataset(points, quarters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--kill-rank", type=int, help="this rank of the start kills itself …")
    parser.add_argument("--at-step", type=int, default=20, help="… in the backward pass of this step")
    options = parser.parse_args()

    dist.init_process_group("hora")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    dataset = quarters_of_a_plane(4096)
    sampler = hora.elastic.ElasticSampler(dataset)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    hora.elastic.protect(model, optimizer, scheduler=scheduler, sampler=sampler)

    first_rank, num_steps = dist.get_rank(), 0
    for epoch in range(sampler.epoch, options.epochs):  # a newcomer begins with the epoch of the others
        sampler.set_epoch(epoch)
        for points, quarters in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), quarters)
            num_steps += 1
            if first_rank == options.kill_rank and num_steps == options.at_step:
                loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
            optimizer.step()
            scheduler.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}, {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
