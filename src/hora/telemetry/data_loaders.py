"""Time that a script waits for its data: torch's DataLoader, metered. Only while somebody watches the job."""

from __future__ import annotations

import threading
import time
from typing import Any

from hora.telemetry.meters import meter

__all__ = ["meter_data_loaders"]


def meter_data_loaders() -> None:
    """Have every DataLoader of this process tell the meter how long `next` took, and how many samples it gave."""
    from torch.utils.data import dataloader

    # No public hook tells this. The class is private and as old as the module; without it only data_s is missing.
    base = getattr(dataloader, "_BaseDataLoaderIter", None)
    if base is None or getattr(base.__next__, "is_metered", False):
        return
    plain, main = base.__next__, threading.main_thread()

    def metered(self: Any) -> Any:
        if threading.current_thread() is not main:  # somebody prefetches: nothing waits for it here
            return plain(self)
        since = time.perf_counter()
        batch = plain(self)
        meter.data_s += time.perf_counter() - since
        meter.num_samples += getattr(getattr(self, "_index_sampler", None), "batch_size", None) or 0
        return batch

    metered.is_metered = True  # type: ignore[attr-defined]
    base.__next__ = metered
