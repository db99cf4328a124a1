"""`horovod.spark.lightning`: an estimator for LightningModules, and a strategy for Lightning's Trainer."""
