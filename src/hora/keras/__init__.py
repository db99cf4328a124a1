"""The `hvd` interface shared by `horovod.keras` and `horovod.tensorflow.keras`, for any Keras version and backend."""
