"""The controller: carries a job out. Poll what happened, ask the policy, act, until the job is over.

Decisions are made in `policy`, processes are started by a `Launcher`; what elastic jobs do as well is in `under_way`.
Called by `start`, `runner.run` and the Spark side.
"""

from __future__ import annotations

import time

from hora.errors import StartTimeoutError
from hora.launch.control import policy
from hora.launch.control.failure_report import signal_text
from hora.launch.control.job_run import JobUnderWay, carry_out
from hora.launch.control.output import Output
from hora.launch.control.rendezvous import ErrorReport
from hora.launch.job import Job, JobResult, Launcher, WorkerExit

__all__ = ["run_job"]

_LOADING_LIMIT_S = 120.0  # torch, from a slow network disk


def run_job(job: Job, launcher: Launcher) -> JobResult:
    """Run the job to its end and close the launcher.

    Raises JobFailedError naming the first failing worker, its traceback as it sent it (or the end of its
    output) and, where it could be pickled, its exception as the cause.
    """
    return carry_out(job, launcher, _FixedJob)


class _FixedJob(JobUnderWay):
    """A job that never changes size: one failure is the end of it."""

    def __init__(self, job: Job, launcher: Launcher, output: Output) -> None:
        super().__init__(job, launcher, output)
        self._started: set[int] = set()
        self._joined: set[int] = set()
        self._returned_at: dict[int, float] = {}
        self._failures: dict[int, policy.Failure] = {}

    def to_the_end(self) -> JobResult:
        worlds = {slot.rank: slot.world(self._meeting) for slot in self._job.slots}
        self.rendezvous.publish(0, worlds)
        self._start((slot, worlds[slot.rank]) for slot in self._job.slots)
        limit_s = self._job.start_timeout_s + (_LOADING_LIMIT_S if self._preload else 0.0)
        deadline = time.monotonic() + limit_s
        while True:
            now = time.monotonic()
            match policy.decide(self._facts(deadline, limit_s), now):
                case policy.Wait(until):
                    self._wait(until)
                case policy.Finish():
                    return self._finish()
                case policy.Fail(failure):
                    self._fail(failure)
                case policy.GiveUp(message):
                    self._end_workers(range(self._job.num_proc), message)
                    raise StartTimeoutError(message)

    def _facts(self, deadline: float, limit_s: float) -> policy.Facts:
        return policy.Facts(
            num_workers=self._job.num_proc,
            needs_results=self._job.function is not None,
            start_deadline=deadline,
            start_timeout_s=limit_s,
            started=frozenset(self._started),
            joined=frozenset(self._joined),
            returned_at=dict(self._returned_at),
            exited={worker: ended.code for worker, ended in self._exits.items()},
            failures=tuple(self._failures.values()),
        )

    # ---- endings ------------------------------------------------------------------------------------------

    def _finish(self) -> JobResult:
        lingering = [slot.rank for slot in self._job.slots if slot.rank not in self._exits]
        if lingering:
            why = f"ranks {lingering} have returned but their processes do not end: ending them"
            self._end_workers(lingering, why)
        return JobResult(
            job=self._id,
            exits=tuple(self._exits[worker] for worker in sorted(self._exits)),
            results=tuple(self._results.get(slot.rank) for slot in self._job.slots),
        )

    def _fail(self, failure: policy.Failure) -> None:
        slot = self._job.slots[failure.worker]
        self._end_workers(
            range(self._job.num_proc),
            f"process {slot.rank} on host {slot.hostname} failed with exit code {failure.code}"
            + (f" ({failure.reason})" if failure.reason else "")
            + ("; ending the others" if self._job.num_proc > 1 else ""),
        )
        self._raise(failure, name=str(slot.rank), rank=slot.rank)

    # ---- events -------------------------------------------------------------------------------------------

    def _on_start(self, worker: int) -> None:
        self._started.add(worker)

    def _on_join(self, worker: int) -> None:
        self._joined.add(worker)

    def _on_return(self, worker: int, result: bytes) -> None:
        self._results[worker] = result
        self._returned_at[worker] = time.monotonic()

    def _on_raise(self, worker: int, report: ErrorReport) -> None:
        self._reports[worker] = report
        self._note(worker, 1, report.headline, consequence=report.consequence)

    def _on_wait(self, worker: int, generation: int) -> None:
        """Only elastic jobs have later generations; a worker of this one waits until its own limit."""

    def _on_loss(self, worker: int) -> None:
        """The launcher tells when the process ends, with its exit code: that is the better news."""

    def _on_exit(self, ended: WorkerExit) -> None:
        worker, code, reason = ended.worker, ended.code, ended.reason
        self._exits[worker] = ended
        returned = self._job.function is None or worker in self._results
        self.rendezvous.worker_exited(worker, f"ended with exit code {code}", failed=code != 0)
        if code == 0 and not returned and worker not in self._failures:
            code, reason = 1, reason or "it ended with status 0 but the function did not return: did it call exit?"
        if code != 0:
            self._note(worker, code, reason or signal_text(code), consequence=self._blames_another(worker))

    def _note(self, worker: int, code: int, reason: str, *, consequence: bool) -> None:
        # Its exception comes first; a different exit code (os._exit, a signal while exiting) adds nothing.
        if worker not in self._failures and not self._ending:
            self._failures[worker] = policy.Failure(
                worker=worker, at=time.monotonic(), code=code, reason=reason, consequence=consequence
            )
