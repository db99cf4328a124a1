"""`TorchDistributor`: pyspark's class of that name with Hora's launcher under it.

The constructor and its checks are pyspark's. `run` starts the processes: on this machine in local mode, else as the
tasks of one Spark stage, encrypted and watched as all jobs are. Importing this module imports pyspark.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.ml.torch import distributor

from hora.errors import BadCallError
from hora.launch.environment import set_variables, variables
from hora.launch.job import JobResult
from hora.launch.providers.spark.cluster import assigned_gpus, connect_session, forwarded_variables, require_slots
from hora.launch.providers.spark.connect import run_on_cluster
from hora.launch.providers.spark.job import SparkJob, slots_of
from hora.platforms.detect import detect_world
from hora.spark.runner import pickle_for_rank_0, run_local, value_of_rank_0

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class TorchDistributor(distributor.TorchDistributor):
    """Runs a function or a file that uses `torch.distributed` on `num_processes` processes.

    `local_mode`: on the driver's machine, else one process in each task of a Spark stage. `use_gpu`: each process has
    the GPU that Spark assigned to its task; False: GPUs are hidden.
    """

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Call `train_object(*args, **kwargs)` on every process and return rank 0's value.

        A path runs that file with `args` as its command line, and returns None. A process that fails ends the job;
        the RuntimeError (`hora.errors.JobFailedError`) names its rank and has its exception as the cause.
        """
        if isinstance(train_object, str):
            if kwargs:
                raise ValueError(
                    f"Running pytorch file does not support key-word type arguments, but they are {sorted(kwargs)}: "
                    f"give {train_object} its command line as strings"
                )
            self._launch(functools.partial(_run_script, train_object), os.path.basename(train_object), args, {})
            return None
        if not callable(train_object):
            raise BadCallError(f"train_object must be a function or the path of a file, but it is {train_object!r}")
        name = getattr(train_object, "__name__", type(train_object).__name__)
        return value_of_rank_0(self._launch(train_object, name, args, kwargs))

    def _launch(
        self, function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> JobResult:
        if self.local_mode:
            environ = variables() | self._local_gpus()
            return run_local(function, args, kwargs, name, environ, num_proc=self.num_processes)
        if self.num_tasks != self.num_processes:
            raise RuntimeError(
                f"spark.task.resource.gpu.amount is {self.num_processes // self.num_tasks}, but each Spark task runs "
                "one process of Hora's: set it to 1"
            )
        cluster = connect_session(self.spark) or self.spark.sparkContext
        require_slots(cluster, self.num_processes)
        job = SparkJob(
            function=pickle_for_rank_0(functools.partial(_run_on_node, function, self.use_gpu), args, kwargs),
            slots=slots_of(self.num_processes),
            title="TorchDistributor",
            function_name=name,
            env=forwarded_variables(),
            wait_for_slots=True,
            bind_gpus=False,
        )
        return run_on_cluster(cluster, job)

    def _local_gpus(self) -> dict[str, str]:
        """As many of the driver's GPUs as there are processes. A Connect client has its own machine's."""
        if not self.use_gpu or getattr(self, "is_remote", False):
            return {}
        return {_VISIBLE: ",".join(distributor._get_gpus_owned(self.spark)[: self.num_processes])}


def _run_script(path: str, *args: Any) -> None:
    """Run a file as the interpreter does, with its folder first on the path."""
    sys.argv[:] = [path, *map(str, args)]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")


def _run_on_node(function: Callable[..., Any], use_gpu: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Call the function where the Spark task is a node of its own, as torchrun has it below pyspark's class."""
    node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(detect_world().rank)}
    set_variables(node | {_VISIBLE: ",".join(assigned_gpus()) if use_gpu else ""})
    return function(*args, **kwargs)
