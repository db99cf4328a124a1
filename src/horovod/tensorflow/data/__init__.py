"""The old name of the `tf.data` service's modules: `hora.tensorflow.data_service`."""
