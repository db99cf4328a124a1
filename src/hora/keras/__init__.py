"""The `hvd` surface for Keras, of whichever version and backend: what `horovod.keras` and `horovod.tensorflow.keras`
share.
"""
