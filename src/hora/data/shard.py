"""One rank's shard of a Parquet dataset, as batches of numpy arrays.

Rows are assigned by number: rank r of n has rows [r·N/n, (r+1)·N/n), independent of files and row groups. So every row
belongs to exactly one rank, and the ranks' shares differ by at most one row. Independent of torch and Spark.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

Rows = Mapping[str, "np.ndarray[Any, Any]"]
_POOL_ROWS = 65536  # size of the shuffle buffer in rows
_AHEAD = 2  # spans to prefetch, per reader


def even_batches(num_rows: int, num_steps: int) -> list[int]:
    """Return the sizes of `num_steps` batches with `num_rows` rows in total, as equal as possible."""
    return [(step + 1) * num_rows // num_steps - step * num_rows // num_steps for step in range(num_steps)]


class DatasetShard:
    """One rank's rows of the dataset at `path`, read in spans (parts of row groups); `transform` maps a span's rows.

    Without a `filesystem`, `path` may be a URL that fsspec opens with the `storage_options`.
    """

    def __init__(
        self,
        path: str,
        *,
        filesystem: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        cur_shard: int = 0,
        shard_count: int = 1,
        columns: Sequence[str] | None = None,
        transform: Callable[[Rows], Rows] | None = None,
        num_readers: int = 2,
        keep: bool = False,
    ) -> None:
        import pyarrow.dataset

        if not 0 <= cur_shard < shard_count:
            raise ValueError(
                f"cur_shard must be at least 0 and less than shard_count={shard_count}, but it is {cur_shard}"
            )
        if filesystem is None:
            import fsspec

            filesystem, path = fsspec.core.url_to_fs(path, **(storage_options or {}))
        self._columns, self._transform = columns, transform
        self._num_readers = num_readers
        self._kept: dict[Any, Rows] | None = {} if keep else None
        dataset = pyarrow.dataset.dataset(path, format="parquet", filesystem=filesystem)
        groups = [
            (group, group.row_groups[0].num_rows)
            for fragment in sorted(dataset.get_fragments(), key=lambda fragment: fragment.path)
            for group in fragment.split_by_row_group()
        ]
        self.shard_count = shard_count
        self.total_rows = sum(rows for _, rows in groups)
        begin, end = (number * self.total_rows // shard_count for number in (cur_shard, cur_shard + 1))
        self.num_rows = end - begin
        self._spans = list(_spans(groups, begin, end))

    def passes(self, *, rng: np.random.Generator | None, num_passes: int | None = None) -> Iterator[Rows]:
        """Yield all rows in pools, `num_passes` times or endlessly (None); in random order with an `rng`."""
        for _ in itertools.count() if num_passes is None else range(num_passes):
            order = list(range(len(self._spans)))
            if rng is not None:
                rng.shuffle(order)
            yield from self._pools(order, rng)

    def batches(self, sizes: Iterator[int], *, rng: np.random.Generator | None) -> Iterator[Rows]:
        """Yield batches of these sizes, continuously over repeated passes."""
        if not self.num_rows:
            raise ValueError("this rank has no rows; use fewer processes, or more data")
        source = self.passes(rng=rng)
        left: Rows = {}
        for size in sizes:
            while _length(left) < size:
                left = _joined(left, next(source))
            yield {name: values[:size] for name, values in left.items()}
            left = {name: values[size:] for name, values in left.items()}

    def endless_batches(self, batch_size: int, *, full: bool, rng: np.random.Generator | None) -> Iterator[Rows]:
        """Yield batches over repeated passes: full ones, or in every `num_steps` of them each row once."""
        if full:
            return self.batches(itertools.repeat(min(batch_size, self.num_rows)), rng=rng)
        return self.batches(itertools.cycle(self.even_sizes(batch_size)), rng=rng)

    def num_steps(self, batch_size: int) -> int:
        """Return the batches of at most this size per pass, the same number on all shards."""
        return max(1, math.ceil(math.ceil(self.total_rows / self.shard_count) / batch_size))

    def even_sizes(self, batch_size: int) -> list[int]:
        """Return the sizes of `num_steps` batches; a shard with fewer rows may repeat one in the last step."""
        return [max(size, 1) for size in even_batches(self.num_rows, self.num_steps(batch_size))]

    def _pools(self, order: Sequence[int], rng: np.random.Generator | None) -> Iterator[Rows]:
        pool: Rows = {}
        for rows in self._read(order):
            pool = _joined(pool, rows)
            if _length(pool) >= _POOL_ROWS:
                yield _shuffled(pool, rng)
                pool = {}
        if _length(pool):
            yield _shuffled(pool, rng)

    def _read(self, order: Sequence[int]) -> Iterator[Rows]:
        if not self._num_readers or self._kept:
            yield from (self._rows_of(number) for number in order)
            return
        with ThreadPoolExecutor(self._num_readers, thread_name_prefix="hora-reader") as readers:
            numbers = iter(order)
            waiting = [
                readers.submit(self._rows_of, number)
                for number in itertools.islice(numbers, self._num_readers * _AHEAD)
            ]
            while waiting:
                rows = waiting.pop(0).result()
                waiting += [readers.submit(self._rows_of, number) for number in itertools.islice(numbers, 1)]
                yield rows

    def _rows_of(self, number: int) -> Rows:
        if self._kept is not None and number in self._kept:
            return self._kept[number]
        group, begin, end = self._spans[number]
        table = group.to_table(columns=list(self._columns) if self._columns else None).slice(begin, end - begin)
        any_type = self._transform is not None
        rows: Rows = {name: _array(table.column(name), name, any_type=any_type) for name in table.column_names}
        if self._transform is not None:
            rows = self._transform(rows)
        if self._kept is not None:
            self._kept[number] = rows
        return rows


def _spans(groups: Sequence[tuple[Any, int]], begin: int, end: int) -> Iterator[tuple[Any, int, int]]:
    """Yield the spans of rows [begin, end): (row group, its first row, its last row + 1)."""
    first = 0
    for group, num_rows in groups:
        low, high = max(begin, first), min(end, first + num_rows)
        if low < high:
            yield group, low - first, high - first
        first += num_rows


def _array(column: Any, name: str, *, any_type: bool) -> np.ndarray[Any, Any]:
    """Return a column as an array: one dimension for numbers, two for lists.

    `any_type`: strings and bytes as objects.
    """
    import pyarrow

    if column.null_count:
        raise TypeError(f"column {name!r} has missing values; fill or drop them")
    kind = column.type
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        values = column.combine_chunks().flatten()
        if pyarrow.types.is_nested(values.type):
            raise TypeError(f"column {name!r} is nested more than once; flatten it")
        flat: np.ndarray[Any, Any] = values.to_numpy(zero_copy_only=False)
        if len(column) and len(flat) % len(column):
            raise ValueError(f"the rows of column {name!r} differ in shape")
        return flat.reshape(len(column), -1)
    if pyarrow.types.is_struct(kind) and [field.name for field in kind] == ["size", "indices", "values"]:
        return _dense(column.combine_chunks(), name)
    found: np.ndarray[Any, Any] = column.to_numpy()
    if found.dtype == object and not any_type:
        raise TypeError(f"column {name!r} holds {kind}, which a tensor cannot hold; leave it out or encode it")
    return found


def _dense(vectors: Any, name: str) -> np.ndarray[Any, Any]:
    """Return vectors that were stored without their zeros as dense arrays."""
    sizes, indices, values = vectors.flatten()
    if not len(vectors):
        return np.zeros((0, 0))
    (extents, lengths) = np.unique(sizes.to_numpy()), indices.value_lengths().to_numpy()
    if len(extents) > 1:
        raise ValueError(f"the rows of column {name!r} differ in shape")
    dense = np.zeros((len(vectors), int(extents[0])))
    dense[np.repeat(np.arange(len(vectors)), lengths), indices.flatten().to_numpy()] = values.flatten().to_numpy()
    return dense


def _length(rows: Rows) -> int:
    return len(next(iter(rows.values()))) if rows else 0


def _joined(one: Rows, other: Rows) -> Rows:
    if not _length(one):
        return other
    return {name: np.concatenate((one[name], other[name])) for name in one}


def _shuffled(rows: Rows, rng: np.random.Generator | None) -> Rows:
    if rng is None:
        return rows
    order = rng.permutation(_length(rows))
    return {name: values[order] for name, values in rows.items()}


class Transformation:
    """A user's function on rows as a pandas DataFrame, and the columns that it changes.

    `edit_fields` are `(name, dtype, shape, nullable)` of the new or changed columns.
    """

    def __init__(
        self,
        function: Callable[[Any], Any] | None,
        edit_fields: Sequence[Any] | None = None,
        removed_fields: Sequence[str] | None = None,
    ) -> None:
        self._function = function
        self._edited = {str(entry[0]): entry for entry in edit_fields or ()}
        self._removed = set(removed_fields or ())

    @classmethod
    def of(cls, spec: Any) -> Transformation:
        """Create it from a function, or from an object with a `func`, such as Petastorm's TransformSpec."""
        if not hasattr(spec, "func"):
            return cls(spec)
        return cls(spec.func, getattr(spec, "edit_fields", None), getattr(spec, "removed_fields", None))

    def __call__(self, rows: Rows) -> Rows:
        changed = self._changed(rows)
        return {name: self._array(name, values) for name, values in changed.items() if name not in self._removed}

    def _changed(self, rows: Rows) -> Mapping[str, Any]:
        import pandas

        frame = pandas.DataFrame({n: list(values) if values.ndim > 1 else values for n, values in rows.items()})
        frame = frame if self._function is None else self._function(frame)
        return {str(name): frame[name].to_numpy() for name in frame.columns}

    def _array(self, name: str, values: Any) -> np.ndarray[Any, Any]:
        if not isinstance(values, np.ndarray) or values.dtype == object:
            values = np.stack([np.asarray(value) for value in values])
        if name in self._edited:
            _, dtype, shape, *_ = self._edited[name]
            values = values.astype(dtype)
            values = values.reshape(len(values), *shape) if shape else values
        return values
