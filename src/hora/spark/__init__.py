"""Spark integration: HorovodRunner, `horovod.spark.run`, and the estimators."""
