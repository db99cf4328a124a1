"""Prefetching data loaders under their old name. Re-exports only."""

from hora.data.loader import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
