"""The old module of the optimizer: `hora.torch.optimizer` and `delta_optimizer`."""

from hora.torch.delta_optimizer import DeltaOptimizer as _DistributedAdasumOptimizer
from hora.torch.optimizer import DistributedOptimizer, _DistributedOptimizer

__all__ = ["DistributedOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer"]
