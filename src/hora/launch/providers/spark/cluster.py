"""The running Spark cluster: its context, its task slots, and the driver's address for executors.

Nothing is started or reserved, except for a session that `cluster_or_new` starts. Spark Connect has no SparkContext:
functions that take a `cluster` also take the client's session. Slots are counted before anything is submitted, so that
a job that can never fit fails at once instead of waiting forever.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import socket
import sys
import threading
import time
from typing import Any

from hora.config import accept_risk
from hora.launch.environment import variables
from hora.net.sockets import is_own
from hora.requirements import require

START_TIMEOUT = "HOROVOD_SPARK_START_TIMEOUT"  # 600 s, as Spark itself tries to place a barrier stage
_POLL_S = 0.1
# Spark itself waits this long for executors of a new application to register.
_REGISTRATION_LIMIT_S = 30.0
# Without any executor: the cluster is starting, or all its cores are in use.
_FIRST_EXECUTOR_LIMIT_S = 60.0
# After an executor has registered: others that started with it may follow.
_NEXT_EXECUTOR_LIMIT_S = 15.0
_NOTICE_AFTER_S = 3.0
_most_seen: dict[str, int] = {}  # application -> the most slots that it ever had

_log = logging.getLogger("hora.launch")


def active_context() -> Any | None:
    """The running SparkContext, or None. ValueError under Spark Connect, which has none."""
    found = active_cluster()
    if is_connect(found):
        raise ValueError(
            "this SparkSession is a Spark Connect client, through which jobs of a changing size cannot be started: "
            "HorovodRunner, horovod.spark.run, the estimators and the workers API can be used. For this, run the "
            "driver in classic mode (SparkSession.builder.master(…) instead of remote(…), without SPARK_REMOTE), or "
            "use processes on this machine"
        )
    return found


def cluster_or_new() -> Any:
    """Return the running SparkContext, or the session of a Spark Connect client; start a session if there is none
    (Spark's configuration names its master).
    """
    found = active_cluster()
    if found is not None:
        return found
    from pyspark.sql import SparkSession

    session = SparkSession.builder.appName("HorovodRunner").getOrCreate()
    return connect_session(session) or session.sparkContext


def active_cluster() -> Any | None:
    """The running SparkContext, or the session of a Spark Connect client, or None."""
    try:
        import pyspark
    except ImportError as error:
        raise ImportError("running on Spark needs pyspark: pip install 'hora-train[spark]'") from error
    require("pyspark", pyspark.__version__)
    from pyspark.sql.utils import is_remote

    # `remote("local[n]")` runs its server on a SparkContext of this process, which refuses what a classic one does.
    return connect_session() if is_remote() else _classic_context() or connect_session()


def is_connect(cluster: Any) -> bool:
    """Return whether this is a Connect client's session, not a SparkContext."""
    return type(cluster).__module__.startswith("pyspark.sql.connect")


def connect_session(session: Any = None) -> Any | None:
    """The session (this process's own unless given), if it is a Spark Connect client's; else None."""
    if session is None:
        from pyspark.sql import SparkSession

        session = SparkSession.getActiveSession()
        if session is None:  # one that another thread has made is not this thread's active one
            module = sys.modules.get("pyspark.sql.connect.session")
            session = getattr(getattr(module, "SparkSession", None), "_default_session", None)
    return session if is_connect(session) else None


def _classic_context() -> Any | None:
    try:
        from pyspark import SparkContext
    except ImportError:  # a client of Connect alone, which comes without
        return None
    context = SparkContext._active_spark_context
    return context if context is not None and context._jsc is not None else None


def is_local(cluster: Any) -> bool:
    """Return True if this machine is the whole cluster, and the executor is the driver's own process."""
    context = _classic_context() if is_connect(cluster) else cluster
    return context is not None and str(context.master).startswith("local")


def check_protection(cluster: Any) -> None:
    """Warn if the cluster exposes the secrets of its tasks; raise ValueError under HORA_STRICT=1.

    Spark's block manager serves tasks, including a stage's secret, to any client unless Spark's authentication is on.
    With local executors the secret is passed otherwise.
    """
    if is_connect(cluster):
        _check_connect(cluster)
    elif not is_local(cluster) and cluster.getConf().get("spark.authenticate", "false").lower() != "true":
        accept_risk(
            f"the Spark cluster at {cluster.master} does not authenticate its own traffic: whoever reaches its network "
            "can read this job's secret there, with it the environment that its processes are given, and run code in "
            "them and in this driver. Set spark.authenticate=true (and spark.network.crypto.enabled=true against "
            "listeners)"
        )


def _check_connect(session: Any) -> None:
    def setting(name: str) -> str:
        with contextlib.suppress(Exception):  # some servers keep their settings to themselves
            return str(session.conf.get(name, ""))
        return ""

    host = server_host(session)
    here = host == "localhost"
    with contextlib.suppress(ValueError):  # a name
        here = here or ipaddress.ip_address(host).is_loopback
    if setting("spark.authenticate").lower() == "true" or (setting("spark.master").startswith("local") and here):
        return
    accept_risk(
        f"the Spark cluster behind {host} does not say that it authenticates its own traffic: whoever listens on its "
        "network can read this job's secret there and run code in its processes. Set spark.authenticate=true (and "
        "spark.network.crypto.enabled=true against listeners), or run where the platform protects that network"
    )


def server_host(session: Any) -> str:
    """Return the host of the Connect server, as the client knows it."""
    return str(session.client.host).strip("[]")


def default_num_proc(cluster: Any) -> int:
    """As many processes as Spark has partitions by default."""
    return count_slots(cluster) if is_connect(cluster) else int(cluster.defaultParallelism)


def count_slots(cluster: Any, resources: Any = None) -> int:
    """Task slots of all registered executors: cores (and GPUs, if tasks ask for them), busy or free.

    `resources`: the ResourceProfile of the tasks; Spark's settings unless given.
    """
    if is_connect(cluster):  # by a plan's leaf, which has one partition per core, at least two
        from pyspark.sql import functions as sql

        numbers = cluster.range(0, 65536).select(sql.spark_partition_id().alias("number"))
        found = numbers.tail(1)[0][0]  # one task, of the last partition
        return (int(found) + 1) // int(cluster.conf.get("spark.task.cpus", "1"))
    context = cluster
    from py4j.protocol import Py4JError

    try:
        scala_context = context._jsc.sc()
        profile = scala_context.resourceProfileManager().defaultResourceProfile()
        if resources is not None:
            profile = resources._java_resource_profile
        return int(scala_context.maxNumConcurrentTasks(profile))
    except Py4JError:
        # Some platforms let Python call only Spark's public methods: then count cores and ignore GPUs.
        return int(context.defaultParallelism)


def check_profile(cluster: Any, resources: Any) -> None:
    """Make a ResourceProfile known to Spark. Raises ValueError for one that cannot be used."""
    from pyspark.resource import ResourceProfile

    if not isinstance(resources, ResourceProfile):
        raise ValueError(f"resources must be a pyspark.resource.ResourceProfile, but it is {resources!r}")
    if is_connect(cluster):
        raise ValueError(
            "resources need a classic SparkContext; through Spark Connect set spark.task.cpus and its like"
        )
    if resources._java_resource_profile is None:
        raise ValueError("make the ResourceProfile after the SparkSession, which checks what it asks for")
    from py4j.protocol import Py4JJavaError

    try:
        cluster._jsc.sc().resourceProfileManager().addResourceProfile(resources._java_resource_profile)
    except Py4JJavaError as error:
        raise ValueError(f"Spark refuses this ResourceProfile: {error.java_exception.getMessage()}") from None


def require_slots(cluster: Any, num_slots: int, *, limit_s: float = math.inf, resources: Any = None) -> int:
    """Return the cluster's slots, at least `num_slots` (0: any number). Raises ValueError if it has fewer.

    With dynamic allocation, executors that Spark may still start count too. Executors of a new application may still be
    registering, so wait for them: a minute if there is none, a few seconds after each arrival, and never longer than
    `limit_s`. A cluster that once had enough slots has lost an executor, which Spark replaces: wait for that as long as
    for the start of tasks. Any other cluster that has been up for a while answers at once.
    """
    if is_connect(cluster):
        slots = count_slots(cluster)
        if slots < num_slots:
            raise ValueError(
                f"np={num_slots} processes need {num_slots} Spark task slots, but the cluster behind this Spark "
                f"Connect session has {slots}; use np={slots} or fewer"
            )
        return slots
    context = cluster
    if allocates_dynamically(context):
        # A profile may ask for other executors than the settings that limit those.
        return max(num_slots, 1) if resources is not None else _require_on_demand(context, num_slots)
    application = context.applicationId if resources is None else f"{context.applicationId}, profile {resources.id}"
    wanted = max(num_slots, 1)
    began = time.time()
    # With num_slots=0 ("all of them") the first executor to register is not yet the whole cluster.
    settled = _settled_at(context)
    lost = 0 < num_slots <= _most_seen.get(application, 0)
    if lost:
        settled = max(settled, began + min(seconds_of(START_TIMEOUT), limit_s))
    noticed, slots = False, count_slots(context, resources)
    while True:
        _most_seen[application] = max(slots, _most_seen.get(application, 0))
        if slots >= wanted and (num_slots > 0 or time.time() >= settled or is_local(context)):
            return slots
        until = max(settled, began + _FIRST_EXECUTOR_LIMIT_S) if slots == 0 else settled
        deadline = min(until, began + limit_s)
        if time.time() >= deadline:
            waited = f"; waited {time.time() - began:.0f} s for a lost executor ({START_TIMEOUT})" if lost else ""
            raise ValueError(_too_few(context, num_slots, slots, resources) + waited)
        if not noticed and time.time() - began > _NOTICE_AFTER_S:
            noticed = True
            _log.warning(
                "waiting for %s to register with %s: %d of %d task slots are there, for %.0f s more at most%s",
                "an executor in place of a lost one" if lost else "Spark executors",
                context.master,
                slots,
                wanted,
                deadline - time.time(),
                f" ({START_TIMEOUT})" if lost else "",
            )
        threading.Event().wait(_POLL_S)
        before, slots = slots, count_slots(context, resources)
        if slots > before:
            settled = max(settled, time.time() + _NEXT_EXECUTOR_LIMIT_S)


def allocates_dynamically(context: Any) -> bool:
    return bool(context.getConf().get("spark.dynamicAllocation.enabled", "false").lower() == "true")


def decommissions(context: Any) -> bool:
    return bool(context.getConf().get("spark.decommission.enabled", "false").lower() == "true")


def dynamic_limits(context: Any) -> tuple[int | None, int | None]:
    """Return the minimum and maximum of slots under dynamic allocation; None without it or without a limit."""
    if not allocates_dynamically(context):
        return None, None
    conf = context.getConf()
    cores = conf.get("spark.executor.cores", "")
    each = int(cores) // int(conf.get("spark.task.cpus", "1")) if cores else 1
    found = (conf.get(f"spark.dynamicAllocation.{name}Executors", "") for name in ("min", "max"))
    least, most = (int(text) * each if text.isdigit() else None for text in found)
    return max(least, 1) if least is not None else None, most


def _require_on_demand(context: Any, num_slots: int) -> int:
    _, capacity = dynamic_limits(context)
    if capacity is not None and capacity < num_slots and context.getConf().get("spark.executor.cores", ""):
        most = context.getConf().get("spark.dynamicAllocation.maxExecutors")
        raise ValueError(
            f"{_too_few(context, num_slots, capacity)}; it may have spark.dynamicAllocation.maxExecutors={most}"
        )
    return max(count_slots(context), num_slots, 1)


def _settled_at(context: Any) -> float:
    """Return when all expected executors will have registered (seconds since the epoch)."""
    started = int(context.startTime) / 1000.0
    if is_local(context):
        return started
    waiting = context.getConf().get("spark.scheduler.maxRegisteredResourcesWaitingTime", "")
    limit_s = float(waiting.removesuffix("s")) if waiting.removesuffix("s").isdigit() else _REGISTRATION_LIMIT_S
    return started + limit_s


def _too_few(context: Any, wanted: int, slots: int, resources: Any = None) -> str:
    conf = context.getConf()
    task_cpus = conf.get("spark.task.cpus", "1")
    gpus = conf.get("spark.task.resource.gpu.amount", "")
    needs = f"spark.task.cpus={task_cpus}" + (f" and spark.task.resource.gpu.amount={gpus}" if gpus else "")
    if resources is not None:
        asked = [f"{name}={request.amount:g}" for name, request in resources.taskResources.items()]
        needs = " and ".join(asked) or "what the settings of Spark say"
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


def driver_addresses(context: Any) -> tuple[str, str]:
    """Return the address to listen on for the executors, and the one under which they reach it.

    Spark has already determined how executors reach the driver. If that is loopback, listen on loopback only.
    """
    if is_local(context):
        return "127.0.0.1", "127.0.0.1"
    conf = context.getConf()
    host = conf.get("spark.driver.host", "") or socket.gethostname()
    return listening_address(host, bind=conf.get("spark.driver.bindAddress", ""))


def listening_address(host: str, *, bind: str = "") -> tuple[str, str]:
    """Return the address to listen on so that others reach this machine as `host`, and that address: loopback stays
    loopback.

    `bind`: where to listen, if that is known.
    """
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:  # a name that only resolves on the other side of the network
        return "0.0.0.0", host
    if ipaddress.ip_address(resolved).is_loopback:
        return str(resolved), str(resolved)
    bind = bind or str(resolved)
    # In a pod the driver's host is often a service's address, which is not an address of this machine.
    return (bind if is_own(bind) else "0.0.0.0"), host


GPU_VARIABLE = "HORA_SPARK_GPUS"
_FORWARDED = ("HOROVOD_", "HORA_", "NCCL_", "GLOO_")
# If the driver runs inside a job, its own place there must not reach its ranks.
_OWN = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HORA_SECRET_FILE",
    "HORA_WORKER_ORDER_FILE",
    "HORA_JOB",
    "HORA_WORKER",
    GPU_VARIABLE,
    "HORA_SPARK_FILES",
)


def forwarded_variables() -> dict[str, str]:
    """Return the driver's runtime settings (such as `HOROVOD_TIMELINE`) for its ranks."""
    return {name: value for name, value in variables().items() if name.startswith(_FORWARDED) and name not in _OWN}


def seconds_of(name: str, *, default_s: float = 600.0) -> float:
    """Return a positive number of seconds from a variable. Raises ValueError if it is anything else."""
    text = variables().get(name, "")
    try:
        seconds = float(text) if text else default_s
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"{name} must be a positive number of seconds, but it is {text!r}")
    return seconds


def assigned_gpus() -> list[str]:
    """The addresses of the GPUs that Spark assigned to this rank's task."""
    text = variables().get(GPU_VARIABLE, "")
    return text.split(",") if text else []
