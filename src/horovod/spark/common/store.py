"""Stores under Horovod's name. Re-exports only."""

from hora.spark.estimator.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store
from hora.spark.estimator.store import Store as AbstractFilesystemStore

__all__ = ["AbstractFilesystemStore", "DBFSLocalStore", "FilesystemStore", "HDFSStore", "LocalStore", "Store"]
