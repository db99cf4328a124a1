"""The old module of the optimizer: `hora.torch.optimizer`."""

from hora.torch.optimizer.adasum import DeltaOptimizer as _DistributedAdasumOptimizer
from hora.torch.optimizer.base import _DistributedOptimizer
from hora.torch.optimizer.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer"]
