"""The parts of `horovod.ray` that need no cluster: arguments, placement, names, tolerated failures."""

from __future__ import annotations

import importlib
import os
import sys
import warnings

import pytest

pytest.importorskip("ray")

import ray

from hora.launch.controller.hosts import ElasticSpec, Hosts
from hora.launch.controller.policy import Limits, Worker, WorkerState
from hora.launch.slots import HostInfo
from hora.net.client import ControlClient
from hora.platforms.detect import detect_world
from horovod.ray import RayExecutor, ray_logger
from horovod.ray.elastic import ElasticRayExecutor
from horovod.ray.elastic import RayHostDiscovery as OldDiscovery
from horovod.ray.elastic_v2 import RayHostDiscovery
from horovod.ray.runner import Coordinator, MiniSettings
from horovod.ray.utils import detect_nics, nics_to_env_var

NAMES = {
    "horovod.ray": "RayExecutor BaseHorovodWorker ElasticRayExecutor ray_logger",
    "horovod.ray.runner": "MiniSettings Coordinator StaticParams RayExecutor StaticAdapter logger",
    "horovod.ray.adapter": "BaseParams Adapter",
    "horovod.ray.strategy": "create_placement_group BaseStrategy ColocatedStrategy PGStrategy",
    "horovod.ray.worker": "BaseHorovodWorker",
    "horovod.ray.utils": "detect_nics nics_to_env_var map_blocking",
    "horovod.ray.elastic": "ElasticRayExecutor RayHostDiscovery TestDiscovery GetTimeoutError",
    "horovod.ray.elastic_v2": "ElasticParams ElasticAdapter RayHostDiscovery TestDiscovery GetTimeoutError",
    "horovod.ray.ray_logger": "configure log warning_raised",
    "horovod.runner.elastic.driver": "ElasticDriver DISCOVER_HOSTS_FREQUENCY_SECS ELASTIC_TIMEOUT_SECS",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_exist_where_programs_look_for_them(module):
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


def test_without_ray_the_error_names_the_package(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[:2] in (["hora", "ray"], ["horovod", "ray"])]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'hora-train\[ray"):
        importlib.import_module("horovod.ray")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "neither num_workers nor num_hosts"),
        ({"num_workers": 2, "num_hosts": 2}, "both given"),
        ({"num_workers": 2, "min_workers": 2}, "Both `min_workers` and `num_workers` provided."),
        ({"max_workers": 2}, "needs min_workers"),
        ({"min_workers": 0, "max_workers": 2}, "must be positive"),
        ({"min_workers": 3, "max_workers": 2}, "less than min_workers"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "use_gpu=True"),
        ({"num_workers": 2, "use_gpu": True, "gpus_per_worker": 0}, "at least 1"),
    ],
)
def test_invalid_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        RayExecutor(MiniSettings(), **arguments)


def test_arguments_of_earlier_releases():
    with pytest.warns(DeprecationWarning, match="cpus_per_worker"):
        executor = RayExecutor(MiniSettings(), num_hosts=2, num_slots=3, cpus_per_slot=2)
    assert (executor.params.num_workers_per_host, executor.params.cpus_per_worker) == (3, 2)
    with pytest.raises(TypeError, match="num_wrokers"):
        RayExecutor(MiniSettings(), num_wrokers=2)


def test_settings_record_the_kind_of_job():
    settings = MiniSettings()
    RayExecutor(settings, min_workers=1)
    assert settings.elastic is True
    RayExecutor(settings, num_workers=2, num_workers_per_host=None)
    assert settings.elastic is False


def test_settings():
    first, second = MiniSettings(), MiniSettings()
    assert first.key != second.key
    assert first.key.hex() not in repr(first)
    assert repr(first.key) not in repr(first)
    assert first.start_timeout is not first.start_timeout
    with pytest.warns(UserWarning, match="no key is written"):
        made = RayExecutor.create_settings(ssh_str="key", ssh_identity_file="/nowhere", timeout_s=7, verbose=2)
    assert (made.timeout_s, made.verbose) == (7, 2)
    elastic = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=3, cooldown_range=(1, 2), verbose=2)
    assert (elastic.min_num_proc, elastic.max_num_proc, elastic.cooldown_range) == (2, 3, (1, 2))
    with pytest.warns(DeprecationWarning, match="min_num_proc"):
        assert ElasticRayExecutor.create_settings(min_np=4).min_num_proc == 4


def test_an_unset_elastic_timeout_defaults_to_the_drivers(monkeypatch):
    monkeypatch.setattr("horovod.runner.elastic.driver.ELASTIC_TIMEOUT_SECS", 7)
    for given, expected in ((None, 7), (50, 50)):
        settings = ElasticRayExecutor.create_settings(min_num_proc=2, elastic_timeout=given)
        assert ElasticRayExecutor(settings)._adapter.limits.elastic_timeout_s == expected


def test_before_start_only_shutdown_is_allowed():
    executor = RayExecutor(MiniSettings(), num_workers=2)
    executor.shutdown()
    for call in (executor.run, executor.run_remote, executor.execute, executor.execute_single):
        with pytest.raises(RuntimeError, match=r"start\(\) first"):
            call(print)
    assert not ray.is_initialized()


def test_ranks_are_local_by_node_id():
    coordinator = Coordinator(MiniSettings())
    for rank, node in enumerate("aaaaabbbbccc"):
        coordinator.register("the-same-name", node, rank)
    places = coordinator.finalize_registration()
    assert coordinator.world_size == 12
    assert coordinator.hostnames == {"the-same-name"}
    assert coordinator.node_id_string == "a:5,b:4,c:3"
    sizes = [place["HOROVOD_CROSS_SIZE"] for place in places.values()]
    assert (sizes.count(1), sizes.count(2), sizes.count(3)) == (1, 2, 9)
    assert places[6] == {
        "HOROVOD_LOCAL_RANK": 1,
        "HOROVOD_LOCAL_SIZE": 4,
        "HOROVOD_CROSS_RANK": 1,
        "HOROVOD_CROSS_SIZE": 3,
    }


def test_the_rendezvous_variables_suffice_and_the_secret_leaves_the_environment(monkeypatch):
    coordinator = Coordinator(MiniSettings(nics=["lo"]))
    coordinator.register("here", "a", 0)
    found = coordinator.establish_rendezvous()
    assert found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
    assert int(found["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == coordinator.global_rendezv_port
    for name, value in {**found, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HORA_SECRET_FILE", "")
    world = detect_world()
    assert found["HORA_SECRET"] not in os.environ.values()
    client = ControlClient.connect(world.rendezvous, name="rank 0", timeout_s=10.0)
    client.set("key", b"value")
    assert client.get("key", timeout_s=10.0) == b"value"
    client.close()
    coordinator.close()


def test_interfaces():
    assert detect_nics(MiniSettings(), ["localhost"]) == ["lo"]
    assert detect_nics(MiniSettings(nics=["eth7"]), ["another.invalid"]) == ["eth7"]
    assert nics_to_env_var(detect_nics(MiniSettings(), ["another.invalid"])) == {}
    with pytest.raises(ValueError, match="eth7"):
        detect_nics(MiniSettings(nics=["eth7"]), ["localhost"])
    with pytest.raises(ValueError, match="1 workers for 2 hosts"):
        detect_nics(MiniSettings(), ["localhost", "127.0.0.1"], [object()])
    assert nics_to_env_var(["a", "b"]) == {"HOROVOD_GLOO_IFACE": "a", "NCCL_SOCKET_IFNAME": "a,b"}


def test_hosts_are_the_live_nodes(monkeypatch):
    def node(address, alive=True, **resources):
        return {"NodeManagerAddress": address, "Resources": resources, "alive": alive}

    nodes = [node("a", CPU=8, GPU=2), node("b", CPU=3), node("c", alive=False, CPU=8), node("d")]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert RayHostDiscovery(cpus_per_worker=2).find_available_hosts_and_slots() == {"a": 4, "b": 1}
    assert OldDiscovery(use_gpu=True, cpus_per_slot=1, gpus_per_slot=1).find_available_hosts_and_slots() == {"a": 2}


def test_logging_without_callbacks_warns_once(monkeypatch):
    monkeypatch.setattr(ray_logger, "warning_raised", False)
    with pytest.warns(UserWarning, match="no callbacks"):
        ray_logger.log({"loss": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ray_logger.log({"loss": 1})


def test_a_host_is_barred_only_after_its_tolerated_failures():
    limits = Limits(num_proc=1, min_num_proc=1)
    hosts = Hosts(ElasticSpec(limits=limits, hosts=(HostInfo("a", 1), HostInfo("b", 1)), forgiven=2))
    failed = Worker(number=0, host="a", slot=0, state=WorkerState.FAILED, generation=0)
    for times in range(3):
        assert not hosts.barred(0.0), times
        hosts.bar(failed, 0.0)
    assert hosts.barred(0.0) == {"a"}
