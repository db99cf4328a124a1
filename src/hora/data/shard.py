"""One rank's shard of a Parquet dataset, as batches of numpy arrays.

Rows are assigned by number: rank r of n has rows [r·N/n, (r+1)·N/n), independent of files and row groups. So every row
belongs to exactly one rank, and the ranks' shares differ by at most one row. Independent of torch and Spark.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from hora.data import delta

Rows = Mapping[str, "np.ndarray[Any, Any]"]
POOL_BYTES = 256 * 2**20  # rows are shuffled in pools of half this size, because shuffling copies them, …
_POOL_ROWS = 65536  # … or of this many rows, so that the first batch does not wait for many small ones
_PIECES = 16  # a span is read in pieces of a pool divided by this
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8}
_AHEAD = 2  # pieces to prefetch, per reader


def even_batches(num_rows: int, num_steps: int) -> list[int]:
    """Return the sizes of `num_steps` batches with `num_rows` rows in total, as equal as possible."""
    return [(step + 1) * num_rows // num_steps - step * num_rows // num_steps for step in range(num_steps)]


class DatasetShard:
    """One rank's rows of the dataset at `path`, read in spans (parts of row groups).

    `path` is a folder of Parquet files, one file, or a Delta table, which may have a version: `table@v5`. Give it one
    if the table may change: all ranks must read the same rows.

    Args:
        filesystem: where `path` is; without one, `path` may be a URL that fsspec opens with the `storage_options`.
        transform: maps the rows of each piece that is read.
        keep: keep all rows in memory after the first pass.
        pool_bytes: memory for the pool in which rows are shuffled.

    Raises:
        ValueError: for a shard or a column that does not exist, or a pool of less than a byte.
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
        pool_bytes: int = POOL_BYTES,
    ) -> None:
        if isinstance(pool_bytes, bool) or not isinstance(pool_bytes, int) or pool_bytes < 1:
            raise ValueError(f"pool_bytes must be an integer of at least 1, but it is {pool_bytes!r}")

        if not 0 <= cur_shard < shard_count:
            raise ValueError(
                f"cur_shard must be at least 0 and less than shard_count={shard_count}, but it is {cur_shard}"
            )
        if filesystem is None:
            filesystem, path = filesystem_of(path, storage_options)
        self._columns, self._transform = columns, transform
        self._num_readers, self._pool_bytes = num_readers, pool_bytes
        self._kept: dict[int, list[Rows]] | None = {} if keep else None
        dataset, _ = open_dataset(filesystem, path)
        self._schema = dataset.schema
        if unknown := sorted(set(columns or ()) - set(dataset.schema.names)):
            raise ValueError(f"the dataset at {path} has no column {', '.join(unknown)}, but {dataset.schema.names}")
        groups = [
            (group, group.row_groups[0].num_rows)
            for fragment in sorted(dataset.get_fragments(), key=lambda fragment: fragment.path)
            for group in fragment.split_by_row_group()
        ]
        # In turn, so that each shard has rows from all parts of the dataset, even if it is sorted.
        groups = [group for number in range(shard_count) for group in groups[number::shard_count]]
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
        pool: Rows = {}
        begin = 0  # the first row of the pool that no batch has had
        for size in sizes:
            parts: list[Rows] = []
            while (lacking := size - sum(map(_length, parts))) > 0:
                if begin == _length(pool):
                    parts = [{name: values.copy() for name, values in part.items()} for part in parts]
                    del pool  # before the next one is made, which takes as much memory
                    pool, begin = next(source), 0
                parts.append({name: values[begin : begin + lacking] for name, values in pool.items()})
                begin += _length(parts[-1])
            yield parts[0] if len(parts) == 1 else _joined(parts)

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
        pieces: list[Rows] = []
        for rows in self._read(order):
            pieces.append(rows)
            if 2 * sum(map(_bytes, pieces)) >= self._pool_bytes or sum(map(_length, pieces)) >= _POOL_ROWS:
                yield _pool(pieces, rng)
        if pieces:
            yield _pool(pieces, rng)

    def _read(self, order: Sequence[int]) -> Iterator[Rows]:
        """Yield the pieces of the spans in this order. The readers are ahead by a piece of each of the next spans."""
        if not self._num_readers or self._kept:
            for number in order:
                yield from self._pieces_of(number)
            return
        with ThreadPoolExecutor(self._num_readers, thread_name_prefix="hora-reader") as readers:

            def begin(number: int) -> tuple[Iterator[Rows], Future[Rows | None]]:
                pieces = self._pieces_of(number)
                return pieces, readers.submit(next, pieces, None)

            numbers = iter(order)
            waiting = [begin(number) for number in itertools.islice(numbers, self._num_readers * _AHEAD)]
            while waiting:
                pieces, coming = waiting[0]
                rows = coming.result()
                if rows is None:
                    del waiting[0]
                    waiting += [begin(number) for number in itertools.islice(numbers, 1)]
                else:
                    waiting[0] = pieces, readers.submit(next, pieces, None)
                    yield rows

    def _pieces_of(self, number: int) -> Iterator[Rows]:
        if self._kept is None:
            yield from self._pieces_of_file(*self._spans[number])
            return
        if number not in self._kept:
            self._kept[number] = list(self._pieces_of_file(*self._spans[number]))
        yield from self._kept[number]

    def _pieces_of_file(self, group: Any, begin: int, end: int) -> Iterator[Rows]:
        from pyarrow.dataset import get_partition_keys
        from pyarrow.parquet import ParquetFile

        (about,) = group.row_groups
        names = list(self._columns or self._schema.names)
        partition = get_partition_keys(group.partition_expression)
        columns = [name for name in names if name not in partition]
        num_bytes = _decoded_bytes(group.metadata.row_group(about.id), columns)
        num_rows = max(1, self._pool_bytes // _PIECES * about.num_rows // max(num_bytes, 1))
        # A dataset's own scanner decodes whole row groups; this reader decodes as many rows as it is asked for.
        with group.filesystem.open_input_file(group.path) as stream:
            batches = ParquetFile(stream, metadata=group.metadata).iter_batches(
                num_rows, row_groups=[about.id], columns=columns, use_threads=False
            )
            first = 0
            for batch in batches:
                low, high = max(begin - first, 0), min(end - first, batch.num_rows)
                first += batch.num_rows
                if low < high:
                    yield self._rows(batch.slice(low, high - low), names, partition)
                if first >= end:
                    return

    def _rows(self, batch: Any, names: Sequence[str], partition: Mapping[str, Any]) -> Rows:
        """Return a batch of a file as arrays. A file lacks the values of its partition, and columns that came later."""
        import pyarrow

        table = pyarrow.Table.from_batches([batch])
        for name in names:
            if name not in table.column_names:
                value = pyarrow.scalar(partition.get(name), self._schema.field(name).type)
                table = table.append_column(name, pyarrow.repeat(value, batch.num_rows))
        any_type = self._transform is not None
        # Copies: the buffers that Arrow decodes lists into have up to twice the room that their values need.
        rows: Rows = {name: _array(table.column(name), name, any_type=any_type).copy() for name in names}
        return rows if self._transform is None else self._transform(rows)


def filesystem_of(url: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return the file system of a URL or a path, and the path there. Databricks' `dbfs:/…` is a mount on every node."""
    import fsspec

    if url.startswith("dbfs:/"):
        url = "/dbfs" + url.removeprefix("dbfs:")
    elif url.startswith("file:/"):
        url = "/" + url.removeprefix("file:").lstrip("/")
    filesystem, path = fsspec.core.url_to_fs(url, **(storage_options or {}))
    return filesystem, str(path)


def open_dataset(filesystem: Any, path: str) -> tuple[Any, str]:
    """Return a pyarrow dataset, and its path: that of a Delta table with the version that was opened."""
    import pyarrow.dataset

    table, version = delta.location(path)
    if delta.is_table(filesystem, table):
        dataset, version = delta.snapshot(filesystem, table, version)
        return dataset, f"{table}@v{version}"
    return pyarrow.dataset.dataset(path, format="parquet", filesystem=filesystem), path


def _spans(groups: Sequence[tuple[Any, int]], begin: int, end: int) -> Iterator[tuple[Any, int, int]]:
    """Yield the spans of rows [begin, end): (row group, its first row, its last row + 1)."""
    first = 0
    for group, num_rows in groups:
        low, high = max(begin, first), min(end, first + num_rows)
        if low < high:
            yield group, low - first, high - first
        first += num_rows


def _decoded_bytes(group: Any, columns: Sequence[str] | None) -> int:
    """Return the size of a row group's columns in memory. A file may hold them many times smaller."""
    chunks = [group.column(number) for number in range(group.num_columns)]
    return sum(
        chunk.num_values * _WIDTHS[chunk.physical_type]
        if chunk.physical_type in _WIDTHS
        else chunk.total_uncompressed_size
        for chunk in chunks
        if columns is None or chunk.path_in_schema.partition(".")[0] in columns
    )


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


def _bytes(rows: Rows) -> int:
    return sum(values.nbytes for values in rows.values())


def _joined(parts: Sequence[Rows]) -> Rows:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _pool(pieces: list[Rows], rng: np.random.Generator | None) -> Rows:
    """Return the rows of the pieces, in random order with an `rng`. Empties the list, so that their memory is free."""
    ends = np.cumsum([0, *map(_length, pieces)])
    # Where each row goes: the rows are copied once, straight to their places.
    places = None if rng is None else np.argsort(rng.permutation(ends[-1]))
    columns = {name: [piece[name] for piece in pieces] for name in pieces[0]}
    pieces.clear()
    pool = {}
    for name in list(columns):
        parts = columns.pop(name)
        if places is None:
            pool[name] = np.concatenate(parts)
            continue
        pool[name] = np.empty((ends[-1], *parts[0].shape[1:]), np.result_type(*parts))
        for part, begin, end in zip(parts, ends, ends[1:], strict=False):
            pool[name][places[begin:end]] = part
    return pool


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
