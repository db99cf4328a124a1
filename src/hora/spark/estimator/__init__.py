"""Training a torch model on a Spark DataFrame: the estimator, the model it returns, and the store between them.

A DataFrame is written to the store as Parquet, every rank reads its share of the rows, and a `TorchModel` comes back.
Users import these names from `horovod.spark`.
"""
