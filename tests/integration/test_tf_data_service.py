"""The tf.data service: a compute job prepares data for a training job, with dispatchers on either side."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="needs TensorFlow: make test-tensorflow")

HOROVODRUN = str(Path(sys.executable).with_name("horovodrun"))

TRAINING = """
import sys
import tensorflow as tf
import horovod.tensorflow as hvd
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

hvd.init()
config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
dataset = tf.data.Dataset.range(40).map(lambda x: x * 10)
if config.dispatcher_side == "compute":
    # With one dispatcher the ranks share the elements, with two each has its own workers and gets all of them.
    mode, shared = "distributed_epoch", config.dispatchers == 1
    mine = dataset.send_to_data_service(config, hvd.rank(), hvd.size(), mode, reuse_dataset=shared)
    found = sorted(int(x) for x in mine)
    hvd.barrier()
else:
    with tf_data_service(config, hvd.rank()) as address:
        options = tf.data.experimental.service.distribute("distributed_epoch", address, job_name="job")
        found = sorted(int(x) for x in dataset.apply(options))
        hvd.barrier()
everything = sorted(x for part in hvd.allgather_object(found) for x in part)
assert everything == sorted([x * 10 for x in range(40)] * config.dispatchers), everything
if hvd.rank() == 0:
    config.compute_client().shutdown()
    print("all elements came")
"""


@pytest.mark.parametrize(("dispatchers", "side"), [(1, "compute"), (2, "compute"), (1, "training")])
def test_a_training_gets_its_data_from_another_job(dispatchers, side, tmp_path):
    script, file = tmp_path / "train.py", tmp_path / "service.json"
    script.write_text(TRAINING)
    options = ["--dispatchers", str(dispatchers), "--dispatcher-side", side]
    module = "horovod.tensorflow.data.compute_worker"
    compute = subprocess.Popen(
        [HOROVODRUN, "-np", "2", sys.executable, "-m", module, str(file), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        command = [HOROVODRUN, "-np", "2", sys.executable, str(script), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert "all elements came" in done.stdout
        assert stat.S_IMODE(file.stat().st_mode) == 0o600  # it contains the key
        output, _ = compute.communicate(timeout=100)
        assert compute.returncode == 0, output[-4000:]
    finally:
        compute.kill()


def listening_sockets(pids):
    """Return the local addresses, with their device, on which these processes listen."""
    lines = subprocess.run(["ss", "-Htlnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[3] for line in lines if any(f"pid={pid}," in line for pid in pids)]


def descendants(pid):
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            found += descendants(int(child))
    return found


def test_servers_of_one_host_accept_nothing_from_others(tmp_path):
    import ipaddress

    from horovod.tensorflow.data.compute_service import TfDataServiceConfig

    file = tmp_path / "service.json"
    module = "horovod.tensorflow.data.compute_worker"
    compute = subprocess.Popen([HOROVODRUN, "-np", "2", sys.executable, "-m", module, str(file)])
    try:
        config = TfDataServiceConfig.read(str(file), wait_for_file_creation=True, timeout=100)
        client = config.compute_client()
        client.wait_for_dispatcher_registration(0, timeout=100)
        client.wait_for_dispatcher_worker_registration(0, timeout=100)
        found = listening_sockets(descendants(compute.pid))
        servers = [address for address in found if "%lo:" in address]
        assert len(servers) == 3, found  # a dispatcher and two workers
        others = [address.rpartition(":")[0].strip("[]") for address in found if address not in servers]
        assert all(ipaddress.ip_address(address).is_loopback for address in others), found
        client.shutdown()
        client.close()
        assert compute.wait(timeout=100) == 0
    finally:
        compute.kill()


# Each rank is its own host.
SEVERAL_HOSTS = os.environ | {"HORA_TRANSPORT": "tcp"}
OPEN = "the servers of tf.data listen on all addresses of these hosts and have no authentication"


def compute_job(file, *options, **environment):
    return subprocess.Popen(
        [HOROVODRUN, "-np", "2", sys.executable, "-m", "horovod.tensorflow.data.compute_worker", str(file), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **environment,
    )


def test_strict_refuses_servers_on_several_hosts(tmp_path):
    compute = compute_job(tmp_path / "service.json", env=SEVERAL_HOSTS | {"HORA_STRICT": "1"})
    try:
        output, _ = compute.communicate(timeout=100)
    finally:
        compute.kill()
    assert compute.returncode != 0
    assert f"ValueError: refused because of HORA_STRICT=1: {OPEN}" in output, output[-4000:]
    assert "Keep them on a private network" in output
    assert not (tmp_path / "service.json").exists()


def test_strict_refuses_dispatchers_in_a_training_on_several_hosts(tmp_path):
    script, file = tmp_path / "train.py", tmp_path / "service.json"
    script.write_text(TRAINING)
    compute = compute_job(file, "--dispatcher-side", "training")  # on one host
    try:
        command = [HOROVODRUN, "-np", "2", sys.executable, str(script), str(file)]
        environment = SEVERAL_HOSTS | {"HORA_STRICT": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
        assert done.returncode != 0
        assert f"ValueError: refused because of HORA_STRICT=1: {OPEN}" in done.stdout + done.stderr
    finally:
        compute.terminate()
        compute.communicate(timeout=100)


def test_servers_on_several_hosts_are_warned_about_once(tmp_path):
    script, file = tmp_path / "train.py", tmp_path / "service.json"
    script.write_text(TRAINING)
    compute = compute_job(file, env=SEVERAL_HOSTS)
    try:
        command = [HOROVODRUN, "-np", "2", sys.executable, str(script), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert "all elements came" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
        output, _ = compute.communicate(timeout=100)
        assert compute.returncode == 0, output[-4000:]
        assert output.count(OPEN) == 1, output[-4000:]
        assert "HORA_STRICT=1 refuses this" in output
    finally:
        compute.kill()


def test_an_invalid_configuration_or_a_service_without_workers_is_rejected(tmp_path):
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig

    config = TfDataServiceConfig(1, 1, "compute", {"lo": [("127.0.0.1", 9)]}, b"k" * 32, timeout=1)
    config.write(str(tmp_path / "file"))
    assert TfDataServiceConfig.read(str(tmp_path / "file")) == config
    assert "key" not in repr(config)
    assert json.loads((tmp_path / "file").read_text())["dispatchers"] == 1
    with pytest.raises(ConnectionError, match="compute workers"):
        config.compute_client()
    with pytest.raises(ValueError, match="dispatcher_side must be one of compute, training"):
        TfDataServiceConfig(1, 1, "elsewhere", {}, b"")
    with pytest.raises(TimeoutError, match="compute_worker"):
        TfDataServiceConfig.read(str(tmp_path / "none"), wait_for_file_creation=True, timeout=0.3)
