"""The estimator for Keras models: `horovod.spark.keras`."""
