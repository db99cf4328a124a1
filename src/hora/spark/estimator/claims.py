"""Claims on the datasets of a store: applications that use one store path at the same time do not share data.

A claim is a small file beside the dataset, written before its owner looks for others: of two applications that come at
the same moment at least one sees the other, and uses another dataset. The owner renews its claim; one that was not
renewed for ten minutes, by the clocks of the drivers, belongs to an application that has died.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid

from hora.spark.estimator.store import Store

_RENEWAL_S, _STALE_S = 60.0, 600.0

_log = logging.getLogger("hora.spark")


class Claim:
    """The claim of this application on the dataset at `index`."""

    def __init__(self, store: Store, index: int | None) -> None:
        self._store = store
        self._folder = f"{store.get_train_data_path(index)}.users"
        self._file = f"{self._folder}/{uuid.uuid4().hex}"
        self._closed = threading.Event()
        self._renewal = threading.Thread(target=self._renew, name="hora-dataset-claim", daemon=True)

    @classmethod
    def acquire(cls, store: Store, index: int | None) -> Claim | None:
        """Return a claim on the dataset, or None if another application has one."""
        claim = cls(store, index)
        claim._write()
        if claim._has_rival():
            claim._remove()
            return None
        claim._renewal.start()
        return claim

    def close(self) -> None:
        """Give the dataset to others. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._renewal.join(_RENEWAL_S)
            self._remove()

    def _write(self) -> None:
        self._store.write_text(self._file, repr(time.time()))

    def _has_rival(self) -> bool:
        files = self._store.fs
        files.invalidate_cache()
        own, found = self._file.rpartition("/")[2], False
        for path in files.find(self._store.get_localized_path(self._folder)):
            name = path.rpartition("/")[2]
            if name != own:
                found = found or self._is_alive(f"{self._folder}/{name}")
        return found

    def _is_alive(self, file: str) -> bool:
        try:
            return time.time() - float(self._store.read(file)) < _STALE_S
        except FileNotFoundError:
            return False
        except ValueError:  # it is being written
            return True

    def _renew(self) -> None:
        while not self._closed.wait(_RENEWAL_S):
            try:
                self._write()
            except OSError as error:
                _log.warning("cannot renew the claim on %s: %s", self._folder, error)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._store.fs.rm_file(self._store.get_localized_path(self._file))
            self._store.fs.rmdir(self._store.get_localized_path(self._folder))  # if it was the last one
