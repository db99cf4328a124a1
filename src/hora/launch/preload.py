"""Modules that a pickled function or a script will import: the fork server imports them once per host, and forks."""

from __future__ import annotations

_READ_WHILE_LOADING = (b"_NUM_THREADS", b"KMP_", b"GOMP_", b"MKL_", b"OPENBLAS_", b"TORCH_", b"LD_PRELOAD")

# Modules that are slow to import, each with the byte strings that reveal it in a pickled function. The fork server
# imports them before it forks ranks. pyarrow is not listed because importing it starts a thread.
_LOADED_IN_ADVANCE = {
    "torch": (b"torch",),
    "horovod.torch": (b"horovod.torch",),
    "hora.elastic": (b"hora.elastic",),
    "hora.spark.estimator.training": (b"hora.spark.estimator.training",),
    "torch._dynamo": (b"torch", b"optim"),
}


def modules_to_preload(function: bytes) -> tuple[str, ...] | None:
    """Return the modules to load once per host before workers are forked: those that the pickled function names and
    will import anyway. None: workers must be executed, because the function sets variables that torch reads at import.
    """
    if any(name in function for name in _READ_WHILE_LOADING):
        return None
    return tuple(name for name, words in _LOADED_IN_ADVANCE.items() if all(word in function for word in words))
