"""Process groups that outlive a world: after a death the same objects have the survivors as members."""

from __future__ import annotations

import horovod


def test_groups_follow_the_survivors_of_a_death_into_the_next_world():
    def survive() -> list[object]:
        import os
        import signal

        import pytest
        import torch
        import torch.distributed as dist

        from hora import engine
        from hora.errors import HorovodInternalError
        from hora.torch.distributed import live

        dist.init_process_group("hora")
        rank, default = dist.get_rank(), dist.group.WORLD
        pair = dist.new_group([0, 3])  # both survive
        torn = dist.new_group([1, 2, 3])
        gone = dist.new_group([1, 2])
        dist.destroy_process_group(gone) if rank in (1, 2) else None
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(HorovodInternalError, match="rank 1"):
            dist.all_reduce(torch.ones(2))
        engine.restart()
        live.carry_all(engine.current_runtime(), limit_s=30.0)
        assert dist.group.WORLD is default
        found: list[object] = [dist.get_rank(), dist.get_world_size(), dist.get_process_group_ranks(default)]
        for group in (default, pair, torn):
            if dist.get_rank(group) >= 0:
                total = torch.tensor([10.0**rank])
                dist.all_reduce(total, group=group)
                dist.broadcast(total, src=dist.get_global_rank(group, 0), group=group)
                found += [dist.get_process_group_ranks(group), total.item()]
        dist.destroy_process_group()
        return found

    first, second, third = horovod.run(survive, num_proc=4, min_num_proc=3)
    assert first == [0, 3, [0, 1, 2], [0, 1, 2], 1101.0, [0, 2], 1001.0]
    assert second == [1, 3, [0, 1, 2], [0, 1, 2], 1101.0, [1, 2], 1100.0]
    assert third == [2, 3, [0, 1, 2], [0, 1, 2], 1101.0, [0, 2], 1001.0, [1, 2], 1100.0]
