"""What a rank does with a column's rows, under its old name. Re-exports only."""

from hora.spark.estimator.metadata import dense_rows_fn as _prepare_data_fn

__all__: list[str] = []
