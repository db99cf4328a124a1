"""`run`: call a function on every rank of a job and get the values back. Users know it as `horovod.run` or `hora.run`.

It checks the arguments, turns them into `Options` and calls `start`. `HorovodRunner`, for Spark clusters, is in
`hora.spark.runner`; `hora.decorator` stands above all launchers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hora.launch.environment import variables
from hora.launch.options import Options, all_options
from hora.launch.pickling import pickle_call
from hora.launch.start import start


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    dashboard: bool | None = None,
    spares: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on ranks and return their values in rank order.

    The function travels by cloudpickle: closures and lambdas are fine. `np`, `min_np`, `max_np` and `network_interface`
    are deprecated names.

    Args:
        func: The function that every rank calls.
        args: Positional arguments of the function, a tuple.
        kwargs: Keyword arguments of the function, a dict.
        num_proc: How many ranks; in an elastic job those to begin with.
        min_num_proc: Elastic: go on as long as there are this many ranks.
        max_num_proc: Elastic: never more ranks than this.
        slots: Elastic: ranks of a host whose discovery line names none.
        reset_limit: Elastic: how many times the job may go on with other ranks before it gives up.
        cooldown_range: Elastic: (shortest, longest) seconds for which a host that failed is left alone.
        hosts: `a:4,b:4`: host names and how many ranks each runs.
        hostfile: A file with one `host slots=N` a line.
        host_discovery_script: Elastic: a program that prints one `host:slots` a line, called again and again.
        start_timeout: Seconds until all ranks must have started.
        ssh_port: The port of sshd on the hosts.
        ssh_identity_file: The private key for ssh.
        disable_cache: Accepted for Horovod's sake; there is no cache of start-up checks.
        output_filename: A folder: each rank's output also goes to a file in it.
        verbose: 0, 1 or 2: how much the launcher says.
        use_gloo: Accepted for Horovod's sake; the engine is Hora's own.
        use_mpi: Accepted for Horovod's sake: refused, because there is no MPI.
        mpi_args: Accepted for Horovod's sake; there is no MPI.
        network_interfaces: Names of the interfaces over which ranks talk, as `eth0`.
        executable: The Python interpreter of the ranks; by default this one.
        dashboard: `True` or `HOST:PORT`: serve the live page of this job.
        spares: Elastic: how many dead ranks of each host are replaced at once, by processes that have imported torch.

    Raises:
        RuntimeError: A rank failed (`hora.errors.JobFailedError`): the error names it, shows its traceback and has its
            exception as the cause.
        ValueError: An argument is invalid.
    """
    if not callable(func):
        raise ValueError(f"func must be callable, but it is {func!r}")
    num_proc = renamed("np", np, "num_proc", num_proc)
    if isinstance(num_proc, bool) or not isinstance(num_proc, int):
        raise ValueError(f"num_proc must be an integer, but it is {num_proc!r}")
    min_num_proc = renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = renamed("max_np", max_np, "max_num_proc", max_num_proc)
    verbose = None if verbose is None else bool(verbose)
    nics = renamed("network_interface", network_interface, "network_interfaces", network_interfaces)
    given = {name: value for name, value in locals().items() if name in all_options()}  # the arguments have their names
    environ = variables()
    options = Options.filled(environ, **given)
    function = pickle_call(func, args, kwargs)
    named = partial(replace, title=getattr(func, "__name__", ""))
    return start(options, environ, function=function, executable=executable, adjust=named).values()


def renamed(old: str, old_value: Any, new: str, new_value: Any) -> Any:
    """Return the value of an argument that may have been given by its old name."""
    if old_value is None:
        return new_value
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)
    return old_value
