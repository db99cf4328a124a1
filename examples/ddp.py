"""Data-parallel training with DistributedDataParallel on Hora.

torchrun --nproc-per-node 2 examples/ddp.py
hora run -np 2 python examples/ddp.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def quarters_of_a_plane(num_samples: int) -> TensorDataset:
    """Return random points of a plane, labelled with their quarter."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(num_samples, 2, generator=generator) * 2 - 1
    quarters = (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long()
    return TensorDataset(points, quarters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hora", help="of torch.distributed: hora or gloo")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    dataset = quarters_of_a_plane(4096)
    sampler = DistributedSampler(dataset)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for points, quarters in DataLoader(dataset, batch_size=64, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), quarters)
            loss.backward()
            optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
