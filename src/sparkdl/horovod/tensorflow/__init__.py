"""The old location of the Keras callback; see `keras`."""
