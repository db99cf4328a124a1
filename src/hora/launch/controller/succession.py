"""Succession: a leader that died is started again, and its agents tell it what it must know.

A controller that others may succeed keeps nothing to itself. What it decides it first sends to the agents (`Remember`),
and acts when every agent with living workers has it. So whatever a worker has acted on, its own agent remembers.

A leader that is started again listens at the same name and port. The agents of the run join it and say what they
remember; the newest memory is the state that it goes on from (`Succession.begin`). Agents that come later lose their
workers, since the job has gone on without them.

Several leaders: a term is greater than those of all leaders before, as far as the agents know. A leader that hears of a
greater term resigns and leaves the workers alone. Two leaders that no agent can both reach do not know of each other:
each goes on with its own agents. When the network is whole again, the agents of the smaller term lose their workers and
join the greater one. `lineage`: the terms that a state descends from, each with the number of its last state. An agent
whose memory is not in the lineage of the chosen state has obeyed a leader that was replaced.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hora.launch.agent.protocol import Join, Remember
from hora.launch.job import LeadershipLostError

if TYPE_CHECKING:
    from hora.launch.controller.agents import Agents
    from hora.launch.controller.launcher import AgentHandle, HostLauncher

_COME_AGAIN_S = 3.0  # agents of a leader that has died come to the next one within this time
_LOOK_S = 0.5
_ALIVE = ("STARTING", "READY", "WORKING")


class Succession:
    """This process's time as the leader of a run. `term`: 0 until it has begun.

    `run`: the name of the run. `leaderless_s`: how long agents and workers wait for a leader. `state`: of the leader
    before, None for the first one. `agents` and `launcher`: of this leader, once it has them.
    """

    agents: Agents
    launcher: HostLauncher

    def __init__(self, run: str, leaderless_s: float) -> None:
        self.run, self.leaderless_s = run, leaderless_s
        self.term = 0
        self.state: dict[str, Any] | None = None
        self._lineage: dict[int, int] = {}  # term -> number of its last state
        self._saved = 0
        self._memory: Remember | None = None
        self._surpassed = False
        self._lost: Callable[[], None] = lambda: None

    # ---- the beginning ------------------------------------------------------------------------------------

    def gather(self, *, num_slots: int | None, limit_s: float, return_s: float) -> None:
        """Wait for the agents of the run: those of the newest memory, or enough for a first leader; then begin.

        Agents of a former leader have a moment to come before newcomers alone begin the run anew. Raises
        StartTimeoutError if too few come for a first leader within `limit_s`. `return_s`: for the agents of living
        workers.
        """
        began = time.monotonic()
        while not (self._newest() or self.agents.enough(None)):
            now = time.monotonic()
            if now >= began + _COME_AGAIN_S and self.agents.enough(num_slots):
                break
            if now >= began + limit_s:
                raise self.agents.too_few(limit_s)
            self.agents.wait_until(lambda: bool(self._newest()) or self.agents.enough(None), _LOOK_S)
        deadline = time.monotonic() + return_s
        self.agents.wait_until(self._all_are_back, return_s)
        # A missing node may have obeyed a later leader than those that are here.
        self.agents.wait_until(lambda: self.agents.enough(None), max(began + _COME_AGAIN_S - time.monotonic(), 0.0))
        self.agents.wait_until(self._all_are_back, max(deadline - time.monotonic(), 0.0))
        self.begin()

    def _newest(self) -> AgentHandle | None:
        """Return the agent with the newest memory; None if no agent has one."""
        known = [node for node in self.agents.joined() if node.joining is not None and node.joining.term]
        return max(known, key=_age, default=None)

    def _all_are_back(self) -> bool:
        newest = self._newest()
        if newest is None:
            return True
        state, lineage = _read(newest)
        back = {node.name for node in self.agents.joined() if self._descends(node, lineage)}
        return _inhabited(state) <= back

    def begin(self) -> None:
        """Choose the newest memory. From now on agents with workers of their own come too late."""
        with self.agents.changed:
            newest = self._newest()
            terms = [node.joining.term for node in self.agents.joined() if node.joining is not None]
            self.term = max(int(time.time() * 1e6), *(term + 1 for term in terms), 1)
            if newest is not None:
                self.state, self._lineage = _read(newest)
            strays = [node for node in self.agents.joined() if not self._descends(node, self._lineage)]
            others = {str(host) for _, host, *_ in (self.state or {}).get("workers", ())}
        for node in strays:
            self.agents.expel(node, _REPLACED)
        self.agents.rename_newcomers(others)

    def _descends(self, node: AgentHandle, lineage: Mapping[int, int]) -> bool:
        """Return whether this agent may keep its workers: a state of this lineage knows them."""
        joining = node.joining
        if joining is None or not joining.term:
            return True
        return joining.saved <= lineage.get(joining.term, -1)

    def objection(self, joining: Join) -> tuple[str, bool]:
        """Return why an agent may not join, or "", and whether it may without its workers. In the server's thread."""
        if not joining.run:
            return "", False
        if joining.run != self.run:
            return f"its workers are of the run {joining.run[:100]}, this one is {self.run}", True
        if not self.term:
            return "", False
        if joining.term > self.term:
            self._surpass()
            return "a later leader has the job", False
        return _REPLACED, True

    # ---- the time as leader -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise LeadershipLostError if a later leader has the job."""
        if self._surpassed:
            raise LeadershipLostError

    def watch(self, lost: Callable[[], None]) -> None:
        """Call `lost`, from any thread, when another process leads."""
        self._lost = lost

    def _surpass(self) -> None:
        self._surpassed = True
        self.agents.notice()
        self._lost()

    @property
    def memory(self) -> Remember | None:
        """The state that all agents are to remember now."""
        return self._memory

    def save(self, state: Mapping[str, Any]) -> None:
        """Return when every agent with living workers remembers the state. Raises LeadershipLostError."""
        self.check()
        self._saved += 1
        lineage = [[term, saved] for term, saved in self._lineage.items()]
        message = self._memory = Remember(self.term, self._saved, json.dumps({**state, "lineage": lineage}))
        hosts = _inhabited(state)
        asked = self.agents.joined()
        for node in asked:
            node.send(message)
        wanted = [node for node in asked if node.name in hosts]

        def remembered() -> bool:
            there = self.agents.joined()
            return self._surpassed or all(
                node.ended or node not in there or node.remembered >= (self.term, message.saved) for node in wanted
            )

        self.agents.wait_until(remembered, None)
        self.check()


_REPLACED = "the job has gone on without the workers here"


def _age(node: AgentHandle) -> tuple[int, int]:
    assert node.joining is not None
    return node.joining.term, node.joining.saved


def _read(node: AgentHandle) -> tuple[dict[str, Any], dict[int, int]]:
    """Return the state that an agent remembers, and its lineage."""
    assert node.joining is not None
    state = json.loads(node.joining.memory)
    return state, {int(term): int(saved) for term, saved in state["lineage"]} | {node.joining.term: node.joining.saved}


def _inhabited(state: Mapping[str, Any]) -> set[str]:
    """Return the hosts on which this state has living workers."""
    return {str(host) for _, host, _, name, *_ in state["workers"] if name in _ALIVE}
