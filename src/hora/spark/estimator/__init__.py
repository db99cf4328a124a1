"""Training of torch models on Spark DataFrames: the estimator, the model it returns, and the store between them.

The estimator writes a DataFrame to the store as Parquet, every rank reads its share of the rows, and `fit` returns a
`TorchModel`. Users import these names from `horovod.spark`.
"""
