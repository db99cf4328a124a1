"""Writing of a dataset by Spark tasks: each task turns the rows of its partition into Parquet, and measures them.

Arrow batches go to Parquet without a Python object per row, a shuffle or a copy in Spark's memory. A task mixes its
rows in pools and writes a pool as equal row groups, one for each rank. Ranks are dealt the row groups in turn
(`hora.data.shard`), so that each has a sample of all parts of a DataFrame, also if that is sorted by its labels.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hora.data.shard import even_batches
from hora.spark.estimator.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_GROUP_BYTES, _POOL_BYTES = 8 * 2**20, 64 * 2**20  # of a row group, of a task's pool: in memory
_ROWS_OF_A_BATCH = 1000  # ten times fewer than Spark's default, which takes 2 GB for images of 200 KB
_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"
_MOVERS = 8


@dataclass
class Extent:
    """Of a column: the rows without a value, and the fewest and the most elements of a row."""

    missing: int = 0
    least: int | None = None
    most: int | None = None

    def add(self, other: Extent) -> None:
        self.missing += other.missing
        self.least = min((size for size in (self.least, other.least) if size is not None), default=None)
        self.most = max((size for size in (self.most, other.most) if size is not None), default=None)


@dataclass
class Written:
    """Result of a task, or of all: the rows and files of each part, and the extents of the columns."""

    num_rows: list[int]
    extents: dict[str, Extent]
    files: list[list[str]] = field(default_factory=list)

    def add(self, other: Written) -> None:
        self.num_rows = [own + others for own, others in zip(self.num_rows, other.num_rows, strict=True)]
        self.files = [[*own, *others] for own, others in zip(self.files, other.files, strict=True)]
        for name, extent in other.extents.items():
            self.extents[name].add(extent)

    @classmethod
    def of(cls, text: str) -> Written:
        found = json.loads(text)
        extents = {name: Extent(**extent) for name, extent in found["extents"].items()}
        return cls(found["num_rows"], extents, found["files"])


def measure(frame: DataFrame, kinds: Mapping[str, str]) -> Written:
    """Return the number of rows and the extents of these columns, given with the kinds of `dataset.Column`."""
    return _collected(frame, _Task(dict(kinds), None, [], "", 1, None), 1)


def write(
    frame: DataFrame, kinds: Mapping[str, str], store: Store, paths: Sequence[str], *, num_ranks: int, split: str | None
) -> Written:
    """Replace the Parquet at the paths by these columns; the rows whose column `split` is true go to the second path.

    Rows without a value or of different lengths are measured, but not always written.
    """
    staging = f"_parts-{uuid.uuid4().hex}"  # readers skip the underscore; a task of an earlier attempt has another
    places = [store.get_localized_path(path) for path in paths]
    files = store.fs
    files.invalidate_cache()
    for place in places:
        if files.exists(place):
            files.rm(place, recursive=True)
    try:
        found = _collected(frame, _Task(dict(kinds), store, places, staging, num_ranks, split), len(places))
        moves = [
            (name, posixpath.join(place, f"part-{number:05d}.parquet"))
            for place, names in zip(places, found.files, strict=True)
            for number, name in enumerate(names)
        ]
        with ThreadPoolExecutor(_MOVERS, thread_name_prefix="hora-store") as movers:
            list(movers.map(lambda move: files.mv(*move), moves))
    finally:
        for place in places:
            with contextlib.suppress(FileNotFoundError):
                files.rm(posixpath.join(place, staging), recursive=True)
    return found


def _collected(frame: DataFrame, task: _Task, num_parts: int) -> Written:
    total = Written([0] * num_parts, {name: Extent() for name in task.kinds}, [[] for _ in range(num_parts)])
    with _small_batches(frame.sparkSession):
        reports = frame.mapInArrow(task, "partition int, report string").collect()
    for _, report in sorted(reports):
        total.add(Written.of(report))
    return total


_lock = threading.Lock()
_users: dict[int, tuple[int, str]] = {}  # sessions with small batches: by how many threads, and what was set before


@contextlib.contextmanager
def _small_batches(session: Any) -> Iterator[None]:
    """Limit the rows that Spark gives to a task at once, also for what else the session runs meanwhile."""
    with _lock:
        number, before = _users.get(id(session), (0, session.conf.get(_BATCH)))
        _users[id(session)] = number + 1, before
        if not number and not 0 < int(before) <= _ROWS_OF_A_BATCH:
            session.conf.set(_BATCH, str(_ROWS_OF_A_BATCH))
    try:
        yield
    finally:
        with _lock:
            number, before = _users.pop(id(session))
            if number > 1:
                _users[id(session)] = number - 1, before
            else:
                session.conf.set(_BATCH, before)


@dataclass
class _Task:
    """The function that Spark calls with the Arrow batches of a partition."""

    kinds: dict[str, str]
    store: Store | None  # None: measure only
    places: list[str]
    staging: str
    num_ranks: int
    split: str | None

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "a Spark task without its context"
        name = f"{context.partitionId():05d}-{context.taskAttemptId()}.parquet"
        with contextlib.ExitStack() as closing:
            written = self._run(batches, name, closing)
        report = {"partition": [context.partitionId()], "report": [json.dumps(asdict(written))]}
        schema = pyarrow.schema({"partition": pyarrow.int32(), "report": pyarrow.string()})
        yield pyarrow.RecordBatch.from_pydict(report, schema)

    def _run(self, batches: Iterable[Any], name: str, closing: contextlib.ExitStack) -> Written:
        extents = {column: Extent() for column in self.kinds}
        parts = [_Part(self.store, posixpath.join(place, self.staging, name), closing) for place in self.places]
        rng, pool = np.random.default_rng(0), []
        num_rows = num_bytes = 0
        for batch in batches:
            for column, kind in self.kinds.items():
                extents[column].add(_extent(batch.column(column), kind))
            pool.append(batch)
            num_rows += batch.num_rows
            num_bytes += batch.nbytes
            if not self.store or any(extent.missing or extent.least != extent.most for extent in extents.values()):
                pool.clear()  # the training refuses these rows
            elif num_bytes >= min(_GROUP_BYTES * self.num_ranks, _POOL_BYTES):
                self._flush(pool, parts, rng)
                num_bytes = 0
        if pool:
            self._flush(pool, parts, rng)
        totals = [part.num_rows for part in parts] or [num_rows]
        files = [[part.path] if part.num_rows else [] for part in parts] or [[]]
        return Written(totals, extents, files)

    def _flush(self, pool: list[Any], parts: Sequence[_Part], rng: np.random.Generator) -> None:
        """Write the rows of the pool in random order, as one row group for each rank. Empties the pool."""
        import pyarrow

        table = pyarrow.Table.from_batches(pool).combine_chunks()
        pool.clear()
        order = rng.permutation(table.num_rows)
        held_out = np.zeros(len(order), bool)
        if self.split is not None:
            held_out = table.column(self.split).to_numpy()[order].astype(bool)
        for part, chosen in zip(parts, (order[~held_out], order[held_out]), strict=False):
            first = 0
            for size in even_batches(len(chosen), self.num_ranks):
                if size:
                    rows = chosen[first : first + size]
                    columns = {
                        name: _gathered(table.column(name), rows, plain=kind != "object")
                        for name, kind in self.kinds.items()
                    }
                    part.write(columns)
                first += size


class _Part:
    """A Parquet file of a task, which begins with the first row group."""

    def __init__(self, store: Store | None, path: str, closing: contextlib.ExitStack) -> None:
        self.path, self.num_rows = path, 0
        self._store, self._closing = store, closing
        self._writer: Any = None

    def write(self, columns: Mapping[str, Any]) -> None:
        """Append a row group."""
        import pyarrow
        from pyarrow import parquet

        if self._writer is None:
            assert self._store is not None, "a task that only measures"
            files = self._store.fs
            files.makedirs(posixpath.dirname(self.path), exist_ok=True)
            fields = [pyarrow.field(name, column.type, nullable=False) for name, column in columns.items()]
            self._schema = pyarrow.schema(fields)
            file = self._closing.enter_context(files.open(self.path, "wb"))
            # Dictionaries double the time and seldom help numbers.
            self._writer = parquet.ParquetWriter(file, self._schema, use_dictionary=False, compression="snappy")
            self._closing.enter_context(self._writer)
        table = pyarrow.table(list(columns.values()), schema=self._schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.num_rows += table.num_rows


def _extent(column: Any, kind: str) -> Extent:
    import pyarrow
    from pyarrow import compute

    if not len(column):
        return Extent()
    missing, lengths = column.null_count, None
    if kind == "vector" and pyarrow.types.is_struct(column.type):  # stored without its zeros
        lengths = column.field("size")
    elif kind in ("vector", "array"):
        missing += column.flatten().null_count
        lengths = compute.list_value_length(column)
    if lengths is None:
        return Extent(missing, 1, 1)
    found = compute.min_max(lengths).as_py()
    return Extent(missing, found["min"], found["max"])


def _gathered(column: Any, rows: np.ndarray[Any, Any], *, plain: bool) -> Any:
    """Return these rows of a column. Arrow gathers lists element by element, NumPy at once."""
    import pyarrow

    whole = column.chunk(0)
    if plain and pyarrow.types.is_list(whole.type) and not pyarrow.types.is_boolean(whole.type.value_type):
        offsets = whole.offsets.to_numpy()
        size = int(offsets[1] - offsets[0])
        if (np.diff(offsets) == size).all():
            values = whole.flatten().to_numpy().reshape(len(whole), size)[rows]
            ends = np.arange(0, values.size + 1, size, dtype=np.int32) if size else np.zeros(len(rows) + 1, np.int32)
            element = pyarrow.field("element", whole.type.value_type, nullable=False)
            return pyarrow.ListArray.from_arrays(ends, values.reshape(-1), type=pyarrow.list_(element))
    return whole.take(pyarrow.array(rows))
