"""`Protection`: the default group of an elastic job, through the deaths of ranks and the arrival of newcomers.

    training --a rank dies, or newcomers wait and this rank is between two steps--> meeting --> training

A meeting takes the survivors into the next world, where each reports how far it is (`settlement`); results that some
have are copied, and what nobody has is begun again. All of it happens inside the call that noticed the end of the world
or, for DDP's buckets, at the end of backward: the user's loop sees a call that took longer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from hora import engine
from hora.errors import HorovodInternalError
from hora.torch.basics import restart
from hora.torch.distributed.group import HoraProcessGroup
from hora.torch.distributed.live import carry, carry_all, forget, name_of, rename
from hora.torch.elastic.handlers import ElasticSampler
from hora.torch.elastic.state import HostUpdateResult, notification_manager
from hora.torch.protection.calls import Call, CallLog
from hora.torch.protection.parcels import send
from hora.torch.protection.settlement import Report, Settlement, settle, shares

log = logging.getLogger("hora")

_NOTICE_S = 1.0  # a broken connection is reported before the launcher's news of the death
_LEFT = 75  # EX_TEMPFAIL: the launcher may start the process again


class Protection:
    """The calls of one group. `teach` and `learn` exchange the state with newcomers, among these ranks."""

    def __init__(
        self,
        group: HoraProcessGroup,
        digest: str,
        teach: Callable[[HoraProcessGroup], None],
        learn: Callable[[HoraProcessGroup], None],
        samplers: Sequence[ElasticSampler] = (),
    ) -> None:
        self.group = group
        self.log = CallLog()
        self.boundary = -1
        self.consumed: list[int] = []  # in a newcomer: the rows of each sampler's epoch that the others have used
        self._digest, self._teach, self._learn = digest, teach, learn
        self._samplers, self._share = samplers, group.rank()
        self._is_member = not engine.is_newcomer()
        self._wishes = 0  # of the launcher: flags of `HostUpdateResult`

    def enter(self) -> None:
        """Meet the other ranks for the first time; a newcomer those of the next world that can admit it."""
        if not self._is_member:
            self.meet("")
            return
        try:
            self._exchange_reports()
        except HorovodInternalError as error:
            if not self._world_is_over():
                raise
            self.meet(str(error))

    # Calls.

    def start(self, call: Call) -> None:
        """Begin a call, in this world or the next."""
        self.log.add(call)
        self._begin(call)

    def _begin(self, call: Call) -> None:
        try:
            call.work = call.begin()
        except HorovodInternalError:
            call.work = None
            if not self._world_is_over():
                self.log.drop(call)
                raise

    def finish(self, call: Call) -> None:
        """Wait until a call is finished, and hand its result over."""
        while not call.finished:
            try:
                if call.work is None:
                    raise engine.current_runtime().status.error()
                call.work.wait()
            except HorovodInternalError as error:
                if not self._world_is_over():
                    self.log.drop(call)
                    raise
                self.meet(str(error))
            else:
                self.log.finish(call)

    def _world_is_over(self) -> bool:
        status, deadline = engine.current_runtime().status, time.monotonic() + _NOTICE_S
        while status.is_open and time.monotonic() < deadline:
            time.sleep(0.005)  # the status has no event, and a connection may break before the news of the death
        return not status.is_open

    # Wishes of the launcher.

    def on_hosts_updated(self, timestamp: int, change: int) -> None:
        """Remember that hosts were added or removed. Called on another thread."""
        self._wishes |= change

    def pass_boundary(self, *, admits: bool) -> None:
        """Begin a step: nothing of it was computed, and the step before is complete. `admits`: newcomers may begin
        with it.
        """
        self.boundary = self.log.next_number if admits else -1
        if self._wishes & HostUpdateResult.leave:
            raise SystemExit(_LEFT)
        if self._wishes and admits:
            self.meet("")

    # Meetings.

    def meet(self, why: str) -> None:
        """Continue in the next world in which the members can agree. `why`: what ended this one, if a death did."""
        began = time.perf_counter()
        while True:
            restart()
            self._wishes = HostUpdateResult.no_update
            notification_manager.init()
            try:
                if self.settle_in():
                    break
            except HorovodInternalError as error:
                if not self._world_is_over():
                    raise
                why = str(error)
        size, took_s = self.group.size(), time.perf_counter() - began
        if self.group.rank() == 0:
            log.warning("%d ranks go on after %.0f ms%s", size, 1000 * took_s, f": {why}" if why else "")

    def settle_in(self) -> bool:
        """Agree with the other ranks of this world on how to go on (collective). Returns False in a newcomer that was
        not admitted, once this world has ended.
        """
        runtime = engine.current_runtime()
        for call in self.log.unfinished():
            if call.has_result:
                self.log.finish(call)
        runtime.start_messages()
        reports = self._exchange_reports()
        settlement = settle(reports)
        if not self._is_member and runtime.world.rank not in settlement.admitted:
            self._wait_for_the_next_world()
            return False
        divisions = shares(reports, settlement)[runtime.world.rank]
        if self._is_member:
            for sampler, division in zip(self._samplers, divisions, strict=True):
                sampler.agree(*division)
            carry_all(runtime, limit_s=self.group.limit_s)
            self._copy_results(settlement)
        if settlement.admitted:
            self._admit(settlement, reports)
            if not self._is_member:
                self._is_member = True
                for sampler, division, consumed in zip(self._samplers, divisions, self.consumed, strict=True):
                    sampler.resume(*division, consumed)
        elif len(reports) > self.group.size():
            self._wishes |= HostUpdateResult.added  # newcomers wait for the end of this step
        self._share = self.group.rank()
        for call in self.log.unfinished():
            self._begin(call)
        return True

    def _exchange_reports(self) -> list[Report]:
        """Return every rank's report (collective, once in a world)."""
        reports = engine.current_runtime().gather("protection", self._report().encode())
        found = [Report.decode(data) for data in reports]
        self._check(found)
        return found

    def _report(self) -> Report:
        return Report(
            worker=engine.current_runtime().world.number,
            is_member=self._is_member,
            group=name_of(self.group),
            digest=self._digest,
            next_call=self.log.next_number,
            unfinished=tuple(call.number for call in self.log.unfinished()),
            kept=tuple(self.log.kept()),
            boundary=self.boundary,
            share=self._share,
            epochs=tuple((sampler.epoch, sampler.num_replicas, sampler.rank) for sampler in self._samplers),
        )

    def _check(self, reports: Sequence[Report]) -> None:
        members = {rank: report for rank, report in enumerate(reports) if report.is_member}
        if not members:
            raise RuntimeError(
                "the state of the training is lost: all ranks that had it died before a newcomer could copy it. "
                "Start the job again from your last checkpoint"
            )
        wanted, rank = next(iter(members.values())).digest, engine.current_runtime().world.rank
        others = {other: report for other, report in enumerate(reports) if report.digest != wanted}
        if not others:
            return
        text = (
            f"hora.elastic.protect: rank(s) {[*others]} have other models or optimizers than rank {min(members)}, "
            f"{next(iter(others.values())).digest} instead of {wanted}: they differ in names, shapes, dtypes or order "
            "of parameters. Build the same model on every rank"
        )
        if rank in others or not others.keys().isdisjoint(members):
            raise ValueError(text)
        if rank == min(members):  # newcomers, which end: those that train go on
            log.error("%s", text)

    def _copy_results(self, settlement: Settlement) -> None:
        """Copy results from ranks that have them to those that lack them (collective among the old members)."""
        if settlement.lost:
            raise RuntimeError(
                f"hora.elastic.protect: the collectives number {list(settlement.lost)} since the start cannot be "
                "completed: only ranks that have died had their results. Start the job again from your last checkpoint"
            )
        for number, rank in settlement.copies:
            call = self.log.call(number)
            send(self.group, call.results, self.group.ranks.index(rank))
            if not call.finished:
                self.log.finish(call)

    def _admit(self, settlement: Settlement, reports: Sequence[Report]) -> None:
        """Make newcomers members, with the state of the member that teaches them (collective)."""
        runtime, teacher = engine.current_runtime(), reports[settlement.teacher]
        if not self._is_member:
            rename(self.group, teacher.group, [report.worker for report in reports if report.is_member])
        carry(self.group, runtime, [reports[rank].worker for rank in settlement.admitted], limit_s=self.group.limit_s)
        if runtime.world.rank != settlement.teacher and self._is_member:
            return
        among = self.group.among([settlement.teacher, *settlement.admitted])
        try:
            (self._teach if self._is_member else self._learn)(among)
        finally:
            forget(among)  # it ends with this world: a rank that carried it into the next one would wait for the others
        if not self._is_member:
            self.log.next_number = self.boundary = teacher.boundary

    def _wait_for_the_next_world(self) -> None:
        """Wait in a newcomer until the members have completed their step, and end this world to admit it."""
        status = engine.current_runtime().status
        while status.is_open:
            time.sleep(0.01)  # the others train: no call of theirs would tell this rank when they are ready
