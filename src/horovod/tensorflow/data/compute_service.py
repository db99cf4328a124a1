"""The old module of the `tf.data` service: `hora.tensorflow.data_service`. Datasets get `send_to_data_service`."""

import tensorflow as tf

from hora.tensorflow.data_service import (
    ComputeClient,
    TfDataServiceConfig,
    compute_worker_fn,
    send_to_data_service,
    tf_data_service,
)

tf.data.Dataset.send_to_data_service = send_to_data_service
