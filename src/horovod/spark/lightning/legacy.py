"""A plain module as a LightningModule. Re-exports only."""

from hora.spark.lightning.module import to_lightning_module

__all__ = ["to_lightning_module"]
