"""The launcher for hosts: workers under an agent on each of them, this machine or others.

Without `agents` all workers run on this machine, under one agent, and nothing listens off loopback.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from hora.launch.controller.agents import AgentHandle, AgentProcess, Agents, LocalAgent
from hora.launch.environment import variables
from hora.launch.job import LaunchEvents, WorkerSpec

__all__ = ["HostLauncher"]

_CLOSE_SLACK_S = 15.0
# What another machine must not get: functions of our shell, our directories and devices, a foreign job's secret.
_PRIVATE = re.compile(r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY")


class HostLauncher:
    """Starts workers on this machine, or on any hosts that have `agents`, this one included.

    `listen`: our address that all of them reach. `process`: an agent for this machine that runs already, to use first.
    """

    def __init__(
        self,
        *,
        agents: Agents | None = None,
        listen: str = "127.0.0.1",
        process: AgentProcess | None = None,
    ) -> None:
        self._agents, self._listen, self._process = agents, listen, process
        self._hosts: dict[str, AgentHandle] = {}
        self._former: list[AgentHandle] = []  # they have ended, or are about to
        self._grace_s = 0.0

    @property
    def bind_address(self) -> str:
        return self._listen

    @property
    def advertised_address(self) -> str:
        return self._listen

    @property
    def local_only(self) -> bool:
        """Return whether workers can be started on this machine only."""
        return self._agents is None

    def _is_remote(self, name: str) -> bool:
        return self._agents is not None and not self._agents.is_own(name)

    def start(self, workers: Sequence[WorkerSpec], events: LaunchEvents) -> None:
        self._grace_s = max([self._grace_s, *(spec.grace_s for spec in workers)])
        by_host: dict[str, list[WorkerSpec]] = {}
        for spec in workers:
            by_host.setdefault("localhost" if self.local_only else spec.slot.hostname, []).append(spec)
        remote = {name for name in by_host if self._is_remote(name)}
        # First all connections, then the workers: an agent's start takes its time, and so the hosts take it together.
        for name in by_host:
            if name in self._hosts and self._hosts[name].ended:  # it was cut off, or killed; it may be back
                self._retire(self._hosts.pop(name))
            if name not in self._hosts:
                self._hosts[name] = self._reach(name, events) if name in remote else self._open(name, events)
        for name, specs in by_host.items():
            self._hosts[name].start([self._for_elsewhere(spec) for spec in specs] if name in remote else specs)

    def adopt(self, workers: Mapping[str, Collection[int]], events: LaunchEvents) -> None:
        """Look after workers that run already, by host, for a leader before us. Those that have ended are reported."""
        for name, numbers in workers.items():
            self._hosts[name] = self._reach(name, events, frozenset(numbers))

    def abandon(self) -> None:
        """Let go of all workers: another leader looks after them."""
        hosts, self._hosts, self._former = [*self._former, *self._hosts.values()], {}, []
        for host in hosts:
            host.abandon()

    def _retire(self, host: AgentHandle) -> None:
        """Keep it until its workers' ends are reported; not waited for, because the caller may hold up the reports."""
        for over in [former for former in self._former if former.over]:
            self._former.remove(over)
            over.wait(_CLOSE_SLACK_S)
        self._former.append(host)

    def _open(self, name: str, events: LaunchEvents) -> AgentHandle:
        """This machine, by an agent that runs already or a new one."""
        running, self._process = self._process, None
        agent = LocalAgent(name, running)
        agent.look_after(events)
        return agent

    def _reach(self, name: str, events: LaunchEvents, ours: Collection[int] = ()) -> AgentHandle:
        """Another machine. `ours`: workers that run there already, for us."""
        assert self._agents is not None
        agent = self._agents.agent(name)
        agent.look_after(events, ours)
        return agent

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        chosen = list(workers)
        for host in self._hosts.values():
            host.terminate(chosen, grace_s=grace_s)

    def clear_up(self, worker: int, *, grace_s: float) -> None:
        """End what a worker that has ended has left running. Does not wait."""
        for host in self._hosts.values():
            host.clear_up(worker, grace_s=grace_s)

    def close(self) -> None:
        hosts, self._hosts, self._former = [*self._former, *self._hosts.values()], {}, []
        for host in hosts:
            host.finish(grace_s=self._grace_s)
        limit = time.monotonic() + self._grace_s + _CLOSE_SLACK_S
        for host in hosts:
            host.wait(max(limit - time.monotonic(), 0.1))

    def _for_elsewhere(self, spec: WorkerSpec) -> WorkerSpec:
        env = {name: value for name, value in spec.env.items() if not _PRIVATE.fullmatch(name)}
        if self._agents is None or not self._agents.brings_environment:
            return replace(spec, env=env)
        # Of our environment only what the job adds to it.
        inherited = variables()
        return replace(spec, env={n: value for n, value in env.items() if inherited.get(n) != value}, cwd=None)
