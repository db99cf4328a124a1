"""The Horovod strategy, which Lightning no longer includes: `Trainer(strategy="horovod")` once this is imported."""

from hora.spark.lightning.package import default_package
from hora.spark.lightning.strategy import horovod_strategy

HorovodStrategy = horovod_strategy(default_package())

__all__ = ["HorovodStrategy"]
