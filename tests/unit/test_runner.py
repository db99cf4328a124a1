"""`horovod.run`: its signature, and arguments rejected before anything is started."""

from __future__ import annotations

import inspect
import threading

import pytest

import hora
import horovod
import horovod.runner


def test_the_old_names_are_one_function():
    assert horovod.run is horovod.runner.run is hora.run


def test_the_signature_is_horovods():
    parameters = inspect.signature(horovod.run).parameters
    assert list(parameters) == [
        *("func", "args", "kwargs", "num_proc", "min_num_proc", "max_num_proc", "slots", "reset_limit"),
        *("cooldown_range", "hosts", "hostfile", "host_discovery_script", "start_timeout", "ssh_port"),
        *("ssh_identity_file", "disable_cache", "output_filename", "verbose", "use_gloo", "use_mpi", "mpi_args"),
        *("network_interface", "network_interfaces", "executable", "np", "min_np", "max_np"),
        *("dashboard", "spares"),  # Hora's own, after all of Horovod's
    ]
    defaults = {name: p.default for name, p in parameters.items() if p.default not in (None, inspect.Parameter.empty)}
    assert defaults == {"args": (), "num_proc": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"func": 42}, "func must be callable, but it is 42"),
        ({"num_proc": "2"}, "num_proc must be an integer, but it is '2'"),
        ({"num_proc": True}, "num_proc must be an integer, but it is True"),
        ({"num_proc": 0}, "-np"),
        ({"hosts": "a:1", "hostfile": "file"}, "exclude one another"),
        ({"use_gloo": True, "use_mpi": True}, "exclude one another"),
        ({"use_mpi": True}, "MPI support has not been built"),
        ({"hosts": "a b c"}, "Invalid host input"),
        ({"num_proc": 3, "hosts": "localhost:2"}, "Requested more processes"),
        ({"start_timeout": -1}, "start-timeout"),
        ({"network_interfaces": ["no-such-nic"]}, "no-such-nic"),
        ({"network_interfaces": "no-such-nic,other"}, "no-such-nic, other"),
        ({"cooldown_range": 5}, "takes 2 numbers, but it is 5"),
    ],
)
def test_invalid_arguments_raise_value_errors(arguments: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        horovod.run(**{"func": print} | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"args": 3}, "args must be a tuple or a list of positional arguments, but it is 3"),
        ({"args": "abc"}, "args must be a tuple or a list of positional arguments, but it is 'abc'"),
        ({"kwargs": [1]}, r"kwargs must be a dict of keyword arguments, but it is \[1\]"),
        ({"args": (threading.Lock(),)}, "cannot be sent to the workers: .*lock.* has to be made inside the function"),
    ],
)
def test_unpicklable_arguments_raise_type_errors(arguments: dict[str, object], message: str):
    with pytest.raises(TypeError, match=message):
        horovod.run(print, **arguments)


@pytest.mark.parametrize("name", ["np", "min_np", "max_np"])
def test_old_argument_names_are_deprecated(name: str):
    with (
        pytest.warns(DeprecationWarning, match=f"{name} is deprecated, use"),
        pytest.raises(ValueError, match="at least 1"),
    ):
        horovod.run(print, **{"num_proc": 2, name: 0})


def test_network_interface_is_deprecated():
    with pytest.warns(DeprecationWarning, match="network_interfaces"), pytest.raises(ValueError, match="no-such-nic"):
        horovod.run(print, network_interface="no-such-nic,other")
