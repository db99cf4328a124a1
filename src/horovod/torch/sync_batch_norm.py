"""The old module of `SyncBatchNorm`: `hora.torch.sync_batch_norm`."""

from hora.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
