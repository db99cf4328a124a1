"""Jobs on a standalone cluster that authenticates and encrypts its own traffic. `make test-spark-protected` runs it.

Not part of `make test`: it starts another cluster, and beyond the settings themselves it covers nothing that other
tests do not.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess

import pytest
from spark_cluster import StandaloneCluster, spark_session

import horovod.spark
from sparkdl import HorovodRunner

pytestmark = [pytest.mark.spark, pytest.mark.protected_spark]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """spark.authenticate, AES for RPC and shuffles, and TLS with a key generated for this run."""
    password, store = secrets.token_hex(16), tmp_path_factory.mktemp("tls") / "keystore.p12"
    keytool = shutil.which("keytool")
    assert keytool, "the JDK's keytool is needed"
    command = f"{keytool} -genkeypair -alias spark -keyalg RSA -dname CN=127.0.0.1 -validity 2 -storetype PKCS12"
    subprocess.run([*command.split(), "-keystore", str(store), "-storepass", password], check=True, capture_output=True)
    return {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secrets.token_hex(32),
        "spark.network.crypto.enabled": "true",
        "spark.io.encryption.enabled": "true",
        "spark.ssl.enabled": "true",
        "spark.ssl.keyStore": str(store),
        "spark.ssl.keyStorePassword": password,
        "spark.ssl.keyPassword": password,
        "spark.ssl.keyStoreType": "PKCS12",
        "spark.ssl.protocol": "TLSv1.3",
    }


@pytest.fixture(scope="module")
def cluster(settings):
    with (
        StandaloneCluster(num_workers=2, cores=1, settings=settings) as cluster,
        spark_session(cluster.url, **settings),
    ):
        yield cluster


def test_the_runner_and_run_work_on_a_fully_encrypted_cluster(cluster, monkeypatch):
    monkeypatch.setenv("HORA_STRICT", "1")  # rejects clusters without spark.authenticate

    def main():
        import torch

        import horovod.torch as hvd

        hvd.init()
        return hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item()

    assert HorovodRunner(np=2).run(main) == 1.0
    assert horovod.spark.run(lambda: os.environ["HOROVOD_RANK"], num_proc=2) == ["0", "1"]
    assert cluster.leftovers() == []
