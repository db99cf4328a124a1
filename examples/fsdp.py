"""Training with sharded parameters (FSDP2, `fully_shard`) on Hora.

torchrun --nproc-per-node 2 examples/fsdp.py
hora run -np 2 python examples/fsdp.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hora", help="of torch.distributed: hora or gloo")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for step in range(options.steps):
        inputs = torch.rand(32, 64)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True) / 32)
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
