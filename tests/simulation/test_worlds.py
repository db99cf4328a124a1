"""Ranks of one world under every kind of fault in virtual time, with the real control tree and negotiation
(`simulated_world`).

    python -m pytest tests/simulation/test_worlds.py --seed 4711     replay one seed exactly

Invariants: all ranks execute the same operations in the same order, and only those that all have announced; without a
fault all ranks execute all agreed operations, and the error of a rank whose peer has left names that peer; no rank is
reported lost unless a fault hit it; and every rank ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
from fibers import Condition, Pool, Thread
from simulated_world import SILENCE_LIMIT_S, ControlServer, SimulatedWorld, connect
from simulator import Network, Simulation, played

from hora.engine import control_tree, handoff, status
from hora.engine.negotiation import tree
from hora.engine.negotiation.tree import Collector

LONGEST_RUN_S = 400.0  # of virtual time: longer than all limits together


class Run:
    """One world."""

    def __init__(self, seed: int) -> None:
        self.simulation, self.network = Simulation(seed), Network()
        self.rng = self.simulation.rng

    def to_the_end(self) -> None:
        with self._in_this_world():
            self.world = world = SimulatedWorld(self.simulation, self.network)
            for _ in range(self.rng.choice([0, 0, 1, 1, 2, 3])):
                self.simulation.after(self.rng.uniform(0.0, 8.0), self._fault)
            try:
                limit = self.simulation.now + LONGEST_RUN_S
                ended = self.simulation.run_until(lambda: all(rank.dead for rank in world.ranks), limit)
                assert ended, f"ranks {[rank.rank for rank in world.ranks if not rank.dead]} wait for ever"
                world.judge()
            finally:
                for rank in world.ranks:
                    rank.end()

    def _fault(self) -> None:
        world, rng, now = self.world, self.rng, self.simulation.now
        alive = [rank for rank in world.ranks if not rank.dead]
        if not alive:
            return
        victim, kind = rng.choice(alive), rng.choice(["kill", "stop", "silence", "cut"])
        world.disturbed = True
        self.simulation.log(f"fault: {kind} rank {victim.rank} of {victim.host}")
        match kind:
            case "kill":
                world.harmed.add(victim.rank)
                victim.kill()
            case "stop":
                victim.stopped_until = max(victim.stopped_until, now + rng.choice([0.5, 3.0, 20.0, 60.0]))
            case "silence":
                lasts_s = rng.choice([0.3, 4.0, 15.0])
                self.network.silence(victim.host, now + lasts_s)
                if lasts_s > SILENCE_LIMIT_S:
                    ends = [end for end in self._ends() if (end.host == victim.host) != (end.other.host == victim.host)]
                    self.simulation.after(SILENCE_LIMIT_S, lambda: self._cut(ends))
            case "cut":
                ends = self._ends()
                self._cut([rng.choice(ends)] if ends else [])

    def _ends(self) -> list:
        return [
            end
            for rank in self.world.ranks
            if hasattr(rank, "control_tree")
            for end in rank.control_tree._server.ends
            if end.open
        ]

    def _cut(self, ends: Iterable) -> None:
        for end in ends:
            self.world.harmed |= {end.speaker, end.other.speaker}
            end.process.later(self.rng.expovariate(100.0), end.ended)
            end.other.process.later(self.rng.expovariate(100.0), end.other.ended)

    @contextlib.contextmanager
    def _in_this_world(self) -> Iterator[None]:
        """Patch the real modules to use the simulation's clock, server, network and fibers."""
        ControlServer.listening, ControlServer.network = {}, self.network
        clock = SimpleNamespace(monotonic=self.simulation.monotonic)
        threads = SimpleNamespace(Condition=Condition, Thread=Thread)
        chance = SimpleNamespace(token_hex=lambda num_bytes: f"{self.rng.getrandbits(8 * num_bytes):x}")
        with contextlib.ExitStack() as stack:
            for module in (control_tree, handoff, tree, status):
                stack.enter_context(mock.patch.object(module, "time", clock))
            for module in (control_tree, handoff, tree):
                stack.enter_context(mock.patch.object(module, "threading", threads))
            for name, other in {"Server": ControlServer, "connect": connect, "secrets": chance}.items():
                stack.enter_context(mock.patch.object(control_tree, name, other))
            stack.enter_context(mock.patch.object(control_tree, "ThreadPoolExecutor", Pool))
            yield


def played_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        played(Run, seed)


def test_invariants_hold_under_random_faults(request: pytest.FixtureRequest):
    seed = request.config.getoption("--seed")
    played_all(range(request.config.getoption("--seeds")) if seed is None else [seed])


@pytest.mark.parametrize(
    "rule", ["news stays where it comes", "one announcement is enough", "one bit is enough", "no goodbye"]
)
def test_a_broken_invariant_is_detected(rule: str, monkeypatch: pytest.MonkeyPatch):
    if rule == "news stays where it comes":
        monkeypatch.setattr(control_tree.ControlTree, "_spread", lambda *_, **__: None)
    elif rule == "one announcement is enough":
        monkeypatch.setattr(Collector, "_complete", lambda *_: True)
    elif rule == "one bit is enough":
        monkeypatch.setattr(tree, "and_", lambda *bits: bits[0] | bits[1])
    else:
        monkeypatch.setattr("simulated_world.Rank._on_leaving", lambda *_: None)
    with pytest.raises(AssertionError, match=r"seed \d+: "):
        played_all(range(200))


def test_a_seed_replays_exactly():
    for seed in range(20):
        assert played(Run, seed).simulation.trace == played(Run, seed).simulation.trace
