"""The Spark surface: HorovodRunner, `horovod.spark.run`, and the estimator."""
