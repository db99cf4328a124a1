"""Spark settings for jobs that restart their tasks, as `(key, value)` pairs for `SparkConf.set(*pair)`.

Plain constants with Horovod's names, re-exported by `horovod.spark.conf`. The keys are those of Spark 3.1
and later, where what used to be called a blacklist is named after what it does.
"""

SPARK_CONF_MAX_INT = str(2**31 - 1)
SPARK_CONF_MAX_INT_MINUS_ONE = str(2**31 - 2)
_ALWAYS = SPARK_CONF_MAX_INT

_MAX_FAILURES = "spark.task.maxFailures"
_EXCLUDE = "spark.excludeOnFailure"
_STAGE_EXECUTOR = f"{_EXCLUDE}.stage.maxFailedTasksPerExecutor"
_STAGE_NODE = f"{_EXCLUDE}.stage.maxFailedExecutorsPerNode"
_TASK_EXECUTOR = f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor"
_TASK_NODE = f"{_EXCLUDE}.task.maxTaskAttemptsPerNode"
_APP_EXECUTOR = f"{_EXCLUDE}.application.maxFailedTasksPerExecutor"
_APP_NODE = f"{_EXCLUDE}.application.maxFailedExecutorsPerNode"

# A task that fails is started again, however often.
SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = (_MAX_FAILURES, _ALWAYS)

# Whether Spark avoids executors and nodes on which tasks have failed.
SPARK_CONF_BLACKLIST_ENABLED = (f"{_EXCLUDE}.enabled", "true")
SPARK_CONF_BLACKLIST_DISABLED = (f"{_EXCLUDE}.enabled", "false")

# Within a stage: an executor on which a task failed, a node on which an executor failed.
SPARK_CONF_REUSE_FAILED_EXECUTOR = (_STAGE_EXECUTOR, _ALWAYS)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR = (_STAGE_EXECUTOR, "1")
SPARK_CONF_REUSE_FAILING_NODE = (_STAGE_NODE, _ALWAYS)
SPARK_CONF_DONT_REUSE_FAILING_NODE = (_STAGE_NODE, "1")

# For the attempts of one task.
SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK = (_TASK_EXECUTOR, _ALWAYS)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK = (_TASK_EXECUTOR, "1")
SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK = (_TASK_EXECUTOR, "1")
SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK = (_TASK_NODE, _ALWAYS)
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK = (_TASK_NODE, "1")
SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK = (_TASK_NODE, "1")

# Over the whole application.
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP = (_APP_EXECUTOR, _ALWAYS)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP = (_APP_EXECUTOR, "1")
SPARK_CONF_REUSE_FAILING_NODE_IN_APP = (_APP_NODE, _ALWAYS)
SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP = (_APP_NODE, "1")

# What Spark does when nothing is set.
SPARK_CONF_DEFAULT_VALUES = {
    _MAX_FAILURES: "4",
    f"{_EXCLUDE}.enabled": "false",
    _STAGE_EXECUTOR: "2",
    _STAGE_NODE: "2",
    _TASK_EXECUTOR: "1",
    _TASK_NODE: "2",
    _APP_EXECUTOR: "2",
    _APP_NODE: "2",
}
