"""The old module of small tools."""

import tensorflow as tf


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())
