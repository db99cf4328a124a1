"""`horovod.ray`: executors that run functions on the actors of a Ray cluster."""

from hora.requirements import require

try:
    import ray
except ImportError as error:
    raise ImportError(f"horovod.ray needs Ray ({error}): pip install 'hora-train[ray]'") from error
require("ray", ray.__version__)
