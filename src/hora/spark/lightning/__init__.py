"""`horovod.spark.lightning`: an estimator for LightningModules, and the strategy for Lightning's own Trainer."""
