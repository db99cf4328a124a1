"""`DistributedOptimizer` and what it is made of: how gradients are grouped, in which order, and how they are reduced."""

from hora.torch.optimizer.base import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
