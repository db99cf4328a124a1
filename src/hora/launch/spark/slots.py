"""How many processes a Spark cluster can run at once, asked of Spark before anything is submitted.

Only the driver's classic SparkContext is asked; nothing is started or reserved. Called by the Spark
launcher and by `HorovodRunner`, so that a job that can never fit is an error at once instead of a stage
that waits for ever.
"""

from __future__ import annotations

import threading
import time
from typing import Any

__all__ = ["allocates_dynamically", "count_slots", "require_slots"]

_POLL_S = 0.1
# Spark itself gives executors of a new application this long to register before it schedules without them.
_REGISTRATION_LIMIT_S = 30.0
_most_seen: dict[str, int] = {}  # application -> the most slots that it ever had


def count_slots(context: Any) -> int:
    """Task slots of all registered executors: cores (and GPUs, if tasks ask for them), busy or free."""
    from py4j.protocol import Py4JError

    try:
        scala_context = context._jsc.sc()
        profile = scala_context.resourceProfileManager().defaultResourceProfile()
        return int(scala_context.maxNumConcurrentTasks(profile))
    except Py4JError:
        # Some platforms let Python call Spark's public methods only. This is the cores, GPUs left out of account.
        return int(context.defaultParallelism)


def require_slots(context: Any, num_slots: int) -> int:
    """The cluster's slots, at least `num_slots` (0: whatever there is); ValueError if it has fewer.

    Where Spark allocates executors on demand, those that it may still start count too. Executors of a young
    application may still be registering, so that is waited for; a cluster that has been up for a while
    answers at once.
    """
    if allocates_dynamically(context):
        return _require_on_demand(context, num_slots)
    wanted = max(num_slots, 1)
    # With num_slots=0 ("all of them") the first executor to register is not yet the whole cluster.
    settled = _settled_at(context)
    if 0 < num_slots <= _most_seen.get(context.applicationId, 0):
        settled = max(settled, time.time() + _REGISTRATION_LIMIT_S)  # an executor was lost: another one will come
    while True:
        slots = count_slots(context)
        _most_seen[context.applicationId] = max(slots, _most_seen.get(context.applicationId, 0))
        if slots >= wanted and (num_slots > 0 or time.time() >= settled or context.master.startswith("local")):
            return slots
        if time.time() >= settled:
            raise ValueError(_too_few(context, num_slots, slots))
        threading.Event().wait(_POLL_S)


def allocates_dynamically(context: Any) -> bool:
    """Whether Spark starts and ends executors as tasks come and go."""
    return bool(context.getConf().get("spark.dynamicAllocation.enabled", "false").lower() == "true")


def _require_on_demand(context: Any, num_slots: int) -> int:
    conf = context.getConf()
    most = conf.get("spark.dynamicAllocation.maxExecutors", "")
    cores = conf.get("spark.executor.cores", "")
    slots = count_slots(context)
    if most and cores:  # otherwise there is no limit that we could know
        capacity = int(most) * (int(cores) // int(conf.get("spark.task.cpus", "1")))
        if capacity < num_slots:
            raise ValueError(
                f"{_too_few(context, num_slots, capacity)}; it may have spark.dynamicAllocation.maxExecutors={most}"
            )
    return max(slots, num_slots, 1)


def _settled_at(context: Any) -> float:
    """When all executors that will come have come (seconds since the epoch)."""
    started = int(context.startTime) / 1000.0
    if context.master.startswith("local"):
        return started
    waiting = context.getConf().get("spark.scheduler.maxRegisteredResourcesWaitingTime", "")
    limit_s = float(waiting.removesuffix("s")) if waiting.removesuffix("s").isdigit() else _REGISTRATION_LIMIT_S
    return started + limit_s


def _too_few(context: Any, wanted: int, slots: int) -> str:
    conf = context.getConf()
    task_cpus = conf.get("spark.task.cpus", "1")
    gpus = conf.get("spark.task.resource.gpu.amount", "")
    needs = f"spark.task.cpus={task_cpus}" + (f" and spark.task.resource.gpu.amount={gpus}" if gpus else "")
    if slots == 0:
        return (
            f"no Spark executor has registered with {context.master}, so none of the {max(wanted, 1)} "
            f"processes can start; check that the cluster has workers with free cores "
            f"(each task needs {needs})"
        )
    return (
        f"np={wanted} processes need {wanted} Spark task slots, but the cluster at {context.master} "
        f"has {slots} (each task needs {needs}); use np={slots} or fewer, "
        "or a cluster with more executor cores" + (" and GPUs" if gpus else "")
    )
