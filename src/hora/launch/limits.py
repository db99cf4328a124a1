"""Time limits of launching, in seconds: how long one process waits for another. Limits that users set are `options`."""

from __future__ import annotations

CONNECT_S = 60.0  # a worker, task or agent reaches its controller, which answers
SILENCE_S = 60  # of the other end of a session
CUT_S = 30  # until the kernel reports a connection whose cable was cut
GRACE_S = 5.0  # between SIGTERM and SIGKILL
UNANSWERED_S = 2 * GRACE_S  # until a guardian kills an agent that does not end
KILLED_S = 15.0  # until processes are gone after SIGKILL, even on a busy machine
END_S = 20.0  # an agent ends by itself when the job is over
UNREAD_S = 3.0  # a console takes output that it is offered, once the job was asked to end
STARTER_END_S = 10.0  # then the process that has started it (ssh, srun)
THREAD_END_S = 5.0  # a thread that must end
SPARK_END_S = 30.0  # Spark ends the tasks of a job that is cancelled or over
