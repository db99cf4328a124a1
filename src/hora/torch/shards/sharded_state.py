"""`ShardedState`: the state of a training whose parameters are sharded, committed to memory that survives a rank.

    enter --> sync --attach--> training --commit--> training … --> end
               ^                  |
               +---- a new world -+

`sync` takes the default process group into the new world and finds the newest whole commit there. `attach` loads it
into the new objects, and commits them at once: from then on this world can lose a rank.
"""

from __future__ import annotations

import gc
import logging
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from hora import engine
from hora.errors import HostsUpdatedInterrupt
from hora.platforms.detect import detect_world
from hora.torch.basics import rank
from hora.torch.distributed.live import start_over
from hora.torch.elastic.state import ObjectState
from hora.torch.functions import allgather_object, broadcast_object
from hora.torch.shards.attached import Attached, merged
from hora.torch.shards.copies import Copies, default_group
from hora.torch.shards.recovery import Holdings, Source, choose, choose_root, keepers_of
from hora.torch.shards.resharding import reshard
from hora.torch.shards.vault import ShardLayout, Vault, homes_of

log = logging.getLogger("hora")


class ShardedState(ObjectState):
    """The state of a training with sharded parameters: `ShardedState(epoch=0, batch=0)`, and attached objects.

    After a change of the world the training function is called again. It makes the model and the optimizer for the new
    world; `attach` loads the last commit into them, resharded. Without an elastic launcher nothing is copied.

    Args:
        kwargs: The plain values that the state keeps, by name.
    """

    _established = False  # this process has taken part in a training before

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(broadcast_object, rank, **kwargs)
        came_later = engine.is_initialized() and engine.current_runtime().world.generation != 0
        self._is_founder = ShardedState._established or not came_later
        self._is_elastic = False
        self._moved = False  # into another world, since the last `sync`
        self._attached: Attached | None = None
        self._vaults: list[Vault] = []  # of this world, and before its first commit is whole, that of the last commit
        self._copies: Copies | None = None
        self._number = 0  # of the last commit
        self._source: Source | None = None  # what `attach` loads
        self._values: dict[str, Any] = {}  # of the source
        self._lost = ""  # why there is nothing to load

    def enter(self) -> bool:
        """Check, before the training function is called, whether this job is elastic."""
        world = engine.current_runtime().world if engine.is_initialized() else detect_world()
        self._is_elastic = engine.has_elastic_launcher(world)
        if not self._is_elastic:
            if world.launcher == "hora" and world.size > 1:
                raise ValueError(
                    "hora.elastic.run with a ShardedState: this job has a fixed size, in which a death ends all ranks; "
                    f"start it with --min-np, such as: hora run -np {world.size} --min-np {max(world.size // 2, 1)} "
                    "python train.py"
                )
            return False
        default_group()
        if not engine.is_newcomer():
            engine.admit_later()
        return True

    # The training's part.

    def attach(self, *, load_checkpoint: Callable[[], object] | None = None, **objects: Any) -> bool:
        """Load the last commit into these objects, and commit them (collective); returns whether there was one.

        Call it once in the training function, after `fully_shard` and after the optimizer is made, on all ranks.

        Args:
            load_checkpoint: Called if the memory has no commit: when the training starts, and when too many hosts were
                lost at once. It loads your last checkpoint, if there is one.
            objects: Models, optimizers, and anything with `state_dict` and `load_state_dict`, by name.

        Raises:
            ValueError: If an object cannot be attached, or does not fit the last commit.
            RuntimeError: If shards were lost and there is no `load_checkpoint`.
        """
        if self._attached is not None:
            raise ValueError(
                "state.attach was called twice in one call of the training function: attach everything in one call, "
                "such as state.attach(model=model, optimizer=optimizer)"
            )
        self._attached = Attached(objects)
        source, self._source = self._source, None
        if source is None:
            self._begin_anew(load_checkpoint)
            return False
        self._load(self._attached, source)
        self._write_down()
        engine.current_runtime().barrier()  # all have written: the commit before may go
        self._forget_old_vaults()
        return True

    def _begin_anew(self, load_checkpoint: Callable[[], object] | None) -> None:
        if self._lost and load_checkpoint is None:
            raise RuntimeError(
                f"the state of the training is lost: {self._lost}. Start the job again from your last checkpoint, or "
                "let state.attach(load_checkpoint=…) load it"
            )
        if self._lost:
            log.error("the state in memory is lost: %s; going back to the last checkpoint", self._lost)
        if load_checkpoint is not None:
            load_checkpoint()

    def _load(self, attached: Attached, source: Source) -> None:
        runtime = engine.current_runtime()
        targets = attached.targets(source.metadata(), self._values)
        reshard(targets, source, self._vault(source), runtime.world.rank, runtime.world.size)
        attached.load(targets, self._values)
        self._values = {}

    def commit(self) -> None:
        """Copy everything to memory that survives this rank (collective); the previous commit stays until all ranks
        have. Then end the world if others wait to join.
        """
        if self._attached is None:
            raise ValueError("state.commit() before state.attach(): attach the model and the optimizer first")
        if not self._is_elastic:
            self._num_commits += 1
            return
        super().commit()

    def save(self) -> None:
        """Do nothing: a commit is made by all ranks together."""

    def _write_down(self) -> None:
        assert self._attached is not None
        tensors = self._attached.tensors()
        content = {"plain": {name: getattr(self, name) for name in self._saved_state}, **self._attached.values()}
        values = pickle.dumps(content)
        if self._copies is not None:
            self._copies.finish()
        vault = self._world_vault()
        fits = vault is not None and vault.layouts[self._rank()].fits(tensors, len(values))
        # Once all are here the last commit is whole, with its copies: the one before it may be overwritten.
        if engine.current_runtime().allreduce_(_count(not fits), "elastic.layouts").item():
            vault = self._new_vault(tensors, len(values))
        else:
            assert vault is not None
            self._vaults = [vault]
        number = self._number + 1
        vault.slot(self._rank(), number).write(number, tensors, values)
        if self._copies is not None:
            self._copies.start(vault, number)
        self._number = number

    def _new_vault(self, tensors: dict[str, torch.Tensor], num_value_bytes: int) -> Vault:
        runtime = engine.current_runtime()
        layout = ShardLayout.of(runtime.world.hostname, tensors, num_value_bytes)
        layouts: list[ShardLayout] = allgather_object(layout, "elastic.layouts_of_commits")
        homes = homes_of(runtime)
        keepers = keepers_of(layouts, homes)
        if keepers and self._copies is None:
            self._copies = Copies(default_group())
        before = self._world_vault()
        key = runtime.world.generation, 0 if before is None else before.key[1] + 1
        vault = Vault(key, layouts, homes, keepers, runtime)
        self._vaults.append(vault)
        return vault

    def _world_vault(self) -> Vault | None:
        """Return this world's newest vault."""
        last = self._vaults[-1] if self._vaults else None
        return last if last is not None and last.key[0] == engine.current_runtime().world.generation else None

    def _vault(self, source: Source) -> Vault | None:
        return next((vault for vault in self._vaults if vault.key == source.key), None)

    def _forget_old_vaults(self) -> None:
        """Free the memory of earlier commits, unless this one has to be copied first."""
        if self._copies is None:
            self._vaults = self._vaults[-1:]

    def check_host_updates(self) -> None:
        """End the world if hosts were added or removed (collective)."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            raise HostsUpdatedInterrupt(False) from None  # the state is in the commit
        self._forget_old_vaults()

    def _agree(self, view: tuple[int, int, int]) -> tuple[int, int, int]:
        # A sum, to which rank 0 alone contributes: no rank goes on before all have written their commit.
        mine = torch.tensor(view if self._rank() == 0 else (0, 0, 0), device="cpu")
        before, latest, changes = engine.current_runtime().allreduce_(mine, "elastic.host_updates").tolist()
        return before, latest, changes

    # The loop's part.

    def restore(self) -> None:
        """Do nothing: `attach` loads the last commit into new objects."""

    def reset(self) -> None:
        """Release the objects of the last world: its model, its gradients, and its process groups."""
        self._attached, self._moved = None, True
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.end()

    def sync(self) -> None:
        """Meet the ranks of the new world, and find the last whole commit (collective)."""
        runtime = engine.current_runtime()
        if self._moved:
            start_over(runtime, default_group())
            _clear_sharding_prop_cache()  # of DTensors: it refers to meshes of the last world, and these to groups
            gc.collect()  # modules and their hooks refer to one another
            self._moved = False
        self._attached, self._source, self._lost = None, None, ""
        report = Holdings(self._is_founder, {vault.key: vault.numbers() for vault in self._vaults})
        reports: list[Holdings] = allgather_object(report, "elastic.reports")
        root = choose_root(reports)
        if root is None:
            founded = any(one.is_founder for one in reports)
            self._lost = "" if founded else "all ranks that had it died before a newcomer could copy it"
        else:
            layouts = {vault.key: vault.layouts for vault in self._vaults}
            found = choose(reports, layouts) if runtime.world.rank == root else None
            found = broadcast_object(found, root, "elastic.source")
            self._adopt(found)
        self._is_founder = ShardedState._established = True

    def _adopt(self, found: Source | str) -> None:
        if isinstance(found, str):
            self._lost, self._vaults = found, []
            return
        mine = self._vault(found)
        own = engine.current_runtime().world.rank
        first = [old for old, holders in found.holders.items() if holders[0] == own]
        values = {old: mine.slot(old, found.number).values() for old in first} if mine is not None else {}
        of_all: list[dict[int, Any]] = allgather_object(values, "elastic.values_of_commit")
        by_rank = {old: its for some in of_all for old, its in some.items()}
        self._source, self._number = found, found.number
        self._values = merged(by_rank[old] for old in sorted(by_rank))
        for name, value in self._values["plain"].items():
            setattr(self, name, value)

    def end_together(self) -> None:
        """Wait until all ranks have finished: another one may need this one's shards until then."""
        engine.current_runtime().barrier()

    def flush(self) -> None:
        """Release everything: the training is over."""
        if self._copies is not None:
            self._copies.finish()
            self._copies.end()
        self._copies, self._attached = None, None
        self._vaults = []


def _count(flag: bool) -> torch.Tensor:
    return torch.tensor([int(flag)], device="cpu")
