"""A user's change to rows while they are read, as a pandas DataFrame. Called by the shard of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hora.data.shard import Rows

__all__ = ["Transformation"]


class Transformation:
    """A user's function on rows as a pandas DataFrame, and the columns it changes.

    `edit_fields` are `(name, dtype, shape, nullable)`, the columns that are new or different afterwards.
    """

    def __init__(
        self, function: Callable[[Any], Any], edit_fields: Sequence[Any] | None, removed_fields: Sequence[str] | None
    ) -> None:
        self._function = function
        self._edited = {str(entry[0]): entry for entry in edit_fields or ()}
        self._removed = set(removed_fields or ())

    @classmethod
    def of(cls, spec: Any) -> Transformation:
        """From a function, or from an object that has it as `func`, as Petastorm's TransformSpec."""
        if not hasattr(spec, "func"):
            return cls(spec, None, None)
        return cls(spec.func, getattr(spec, "edit_fields", None), getattr(spec, "removed_fields", None))

    def __call__(self, rows: Rows) -> Rows:
        import pandas

        frame = pandas.DataFrame({n: list(values) if values.ndim > 1 else values for n, values in rows.items()})
        frame = self._function(frame)
        return {str(name): self._array(frame, str(name)) for name in frame.columns if name not in self._removed}

    def _array(self, frame: Any, name: str) -> np.ndarray[Any, Any]:
        values = frame[name].to_numpy()
        if values.dtype == object:
            values = np.stack([np.asarray(value) for value in values])
        if name in self._edited:
            _, dtype, shape, *_ = self._edited[name]
            values = values.astype(dtype).reshape(len(values), *(shape or ()))
        return values
