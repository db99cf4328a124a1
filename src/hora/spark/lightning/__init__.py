"""`horovod.spark.lightning`: fit a LightningModule on a Spark DataFrame; and the strategy for Lightning's own
Trainer.
"""
