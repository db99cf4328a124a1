"""The old module of the optimizer: `hora.torch.optimizer`."""

from hora.torch.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
