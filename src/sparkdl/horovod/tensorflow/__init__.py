"""The old place of the Keras callback; see `keras`."""
