"""Words and numbers of Horovod's estimators."""

ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"
PETASTORM_HDFS_DRIVER = "libhdfs"
METRIC_PRINT_FREQUENCY = 100
BYTES_PER_GIB = 2**30
TOTAL_BUFFER_MEMORY_CAP_GIB = 4
