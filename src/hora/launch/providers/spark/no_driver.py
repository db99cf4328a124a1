"""Ranks on a Spark cluster are no drivers: a SparkSession there would start a JVM of its own, with a cluster of one.

They have the files of the application (`SparkFiles.get`), as Spark's Python workers have. Pyspark is changed when a
rank imports it, and not before. Spark Connect, which starts nothing, is left alone.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn

from hora.launch.environment import variables

NO_DRIVER = "HORA_SPARK_RANK"  # set in the ranks of Spark's tasks
FILES = "HORA_SPARK_FILES"  # and where the application's files are there
_STARTER = "pyspark.java_gateway"


def forbid_driver() -> None:
    """Have this process raise an error where pyspark would start a JVM."""
    for name in (_STARTER, "pyspark.core.context", "pyspark.context"):
        if name in sys.modules:
            _forbid(sys.modules[name])
    if _STARTER not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the module that starts JVMs, and changes it once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _STARTER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_forbid(module: ModuleType) -> None:
                load(module)
                _forbid(module)

            spec.loader.exec_module = load_and_forbid  # type: ignore[method-assign]
        return spec


def _forbid(module: ModuleType) -> None:
    if hasattr(module, "launch_gateway"):
        module.launch_gateway = _refuse  # type: ignore[attr-defined]
    if root := variables().get(FILES):
        for name in ("pyspark.core.files", "pyspark.files"):  # the second until Spark 3.5
            with contextlib.suppress(ModuleNotFoundError):
                files = importlib.import_module(name).SparkFiles
                files._root_directory, files._is_running_on_worker = root, True


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "a rank has no Spark: it runs in a Spark task, and a SparkSession here would start a cluster of its own. Use "
        "Spark before the job, on the driver: collect or write the data there, for example with make_spark_converter, "
        "and pass values to the function as arguments"
    )
