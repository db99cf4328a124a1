"""Steps of a rank, under old names. Re-exports only."""

from hora.spark.estimator.metadata import dense_rows_fn as _prepare_data_fn
from hora.spark.estimator.objective import weighted_loss_fn as _calculate_loss_fn

__all__: list[str] = []
