"""Ray Data for executors: each rank reads its own shard of a dataset, as in Ray Train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DEFAULT = "train"  # the name of a dataset that has none, as in Ray Train
_shards: dict[str, Any] = {}  # of this process's rank


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """Return this rank's shard of a dataset of `RayExecutor.run(…, datasets=…)`: a `ray.data.DataIterator`.

    All shards have the same number of rows, so that no rank waits for another one at the end of an epoch. Every rank
    must iterate over it equally often: Ray begins an epoch when all ranks have.

    Args:
        dataset_name: the dataset's key in `datasets`; "train" without one.

    Raises:
        KeyError: if `run` was called without such a dataset.
    """
    name = dataset_name or DEFAULT
    if name not in _shards:
        known = ", ".join(map(repr, _shards)) or "none"
        raise KeyError(
            f"there is no dataset {name!r}, only {known}: pass it with executor.run(…, datasets={{{name!r}: …}})"
        )
    return _shards[name]


def keep_shards(shards: Mapping[str, Any]) -> None:
    """Replace this process's shards."""
    _shards.clear()
    _shards.update(shards)


def named(datasets: Any) -> dict[str, Any]:
    """Return a user's datasets by name. Raises ValueError for what Ray cannot split."""
    if datasets is None:
        return {}
    from ray.data import Dataset

    found = dict(datasets) if isinstance(datasets, Mapping) else {DEFAULT: datasets}
    for name, dataset in found.items():
        if not isinstance(dataset, Dataset):
            raise ValueError(
                f"the dataset {name!r} must be a ray.data.Dataset, such as ray.data.read_parquet(…) or "
                f"ray.data.from_items(…), but it is a {type(dataset).__module__}.{type(dataset).__qualname__}"
            )
    return found


def check_free_cores(num_workers: int, cpus_per_worker: float) -> None:
    """Raise ValueError if the workers hold all cores of the cluster: Ray Data, which needs one, would wait for ever."""
    import ray

    total = ray.cluster_resources().get("CPU", 0.0)
    if total - num_workers * cpus_per_worker < 1:
        raise ValueError(
            f"Ray Data needs a core that no worker holds, but {num_workers} workers with cpus_per_worker="
            f"{cpus_per_worker} hold all {total:g} of the cluster: use fewer of them, or a larger cluster"
        )


def split(datasets: Mapping[str, Any], nodes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the shards of each rank. `nodes`: of the ranks, to which Ray sends the blocks that lie there already.

    Raises ValueError for a dataset in memory that has fewer rows than there are ranks.
    """
    from ray.data.dataset import MaterializedDataset

    for name, dataset in datasets.items():
        if isinstance(dataset, MaterializedDataset) and dataset.count() < len(nodes):
            raise ValueError(f"the dataset {name!r} has {dataset.count()} rows, too few for {len(nodes)} ranks")
    shards = {
        name: dataset.streaming_split(len(nodes), equal=True, locality_hints=list(nodes))
        for name, dataset in datasets.items()
    }
    return [{name: of_ranks[rank] for name, of_ranks in shards.items()} for rank in range(len(nodes))]
