"""FSDP2 that goes on when ranks die: from the last commit, which lies in memory that the dead rank shared.

hora run -np 4 --min-np 2 python examples/fsdp_elastic.py
hora run -np 2 --min-np 1 python examples/fsdp_elastic.py --kill-rank 1 --at-step 33
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hora.elastic

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--kill-rank", type=int, help="this rank of the start kills itself …")
parser.add_argument("--at-step", type=int, default=33, help="… in the backward pass of this step")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 1))


@hora.elastic.run
def train(state: hora.elastic.ShardedState, options: argparse.Namespace, first_rank: int) -> None:
    """Called again in every new world."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    state.attach(model=model, optimizer=optimizer, scheduler=scheduler)  # in later worlds: with the last commit's state

    while state.step < options.steps:
        generator = torch.Generator().manual_seed(1000 * state.step + dist.get_rank())
        inputs = torch.rand(32, 64, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True) / 32)
        if first_rank == options.kill_rank and state.step == options.at_step:
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss.backward()
        optimizer.step()
        scheduler.step()
        state.step += 1
        if state.step % 10 == 0:
            state.commit()
            mean = loss.detach()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(f"step {state.step}: loss {mean.item():.4f}, {dist.get_world_size()} ranks", flush=True)


def main() -> None:
    options = parser.parse_args()
    dist.init_process_group("hora")
    train(hora.elastic.ShardedState(step=0), options, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
