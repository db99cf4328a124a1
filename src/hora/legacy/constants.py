"""Words and numbers that old modules are imported for."""

from __future__ import annotations

from typing import Any, NoReturn

# horovod.spark.common.constants
ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"
MIXED_SPARSE_DENSE_VECTOR = "mixed_sparse_dense_vector"
SPARSE_VECTOR = "sparse_vector"
DENSE_VECTOR = "dense_vector"
PETASTORM_HDFS_DRIVER = "libhdfs"
METRIC_PRINT_FREQUENCY = 100
BYTES_PER_GIB = 2**30
TOTAL_BUFFER_MEMORY_CAP_GIB = 4

# horovod.runner.elastic.worker: the variables in which Horovod's workers find Horovod's rendezvous; ours have a secret
# and an address of their own.
HOROVOD_GLOO_RENDEZVOUS_ADDR = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
HOROVOD_GLOO_RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
HOROVOD_GLOO_IFACE = "HOROVOD_GLOO_IFACE"
HOROVOD_HOSTNAME = "HOROVOD_HOSTNAME"
HOROVOD_LOCAL_RANK = "HOROVOD_LOCAL_RANK"

# horovod.runner.elastic.rendezvous, which is served over HTTP there
GET_RANK_AND_SIZE = "rank_and_size"
PUT_WORKER_ADDRESSES = "worker_addresses"


def create_rendezvous_handler(driver: Any) -> NoReturn:
    """Refuse: there is no such rendezvous here."""
    raise ValueError("there is no rendezvous over HTTP here: use horovod.run(…, min_num_proc=…) for elastic jobs")
