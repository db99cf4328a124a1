"""The old module of `SyncBatchNorm`: `hora.torch.sync_batch_norm`."""

from hora.torch.sync_batch_norm import SyncBatchNorm
from hora.torch.sync_batch_norm import _Normalise as _SyncBatchNorm

__all__ = ["SyncBatchNorm", "_SyncBatchNorm"]
