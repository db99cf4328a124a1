"""Data loaders that read ahead, under their old name. Re-exports only."""

from hora.data.loader import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
