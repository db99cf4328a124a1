"""`horovod.ray`: executors that run functions on the actors of a Ray cluster."""

try:
    import ray  # noqa: F401
except ImportError as error:
    raise ImportError(f"horovod.ray needs Ray ({error}): pip install 'hora[ray]'") from error
