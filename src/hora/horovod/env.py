"""What `horovod.runner.common.util.env` offers: a process's rank and size without a World.

Only old code asks this way; ours uses `World.from_env`, which knows more launchers and checks what it finds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["get_env_rank_and_size"]

_PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def get_env_rank_and_size(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Rank and size from the first pair of variables that is set, (0, 1) without one.

    RuntimeError when only one variable of a pair exists.
    """
    env = os.environ if environ is None else environ
    for rank_name, size_name in _PAIRS:
        rank, size = env.get(rank_name), env.get(size_name)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            found, missing = (rank_name, size_name) if size is None else (size_name, rank_name)
            raise RuntimeError(f"{found} is set but {missing} is not; set both or neither")
    return 0, 1
