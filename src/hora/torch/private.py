"""The private names of torch that Hora relies on, with what happens in a torch without them.

A name is a path from `torch`, which versions before `since` may lack. `tests/unit/test_private_names.py` compares this
table with the installed torch and with the source: a torch that drops a name, and a new use of one, are noticed there.
"""

from __future__ import annotations

from typing import NamedTuple


class PrivateName(NamedTuple):
    """A private name, or several beside one another (`torch.a.{b,c}`)."""

    path: str
    without: str  # what happens in a torch without it
    since: tuple[int, int] = (2, 3)  # the first version that has it; older ones are served as `without` says

    @property
    def paths(self) -> list[str]:
        head, brace, rest = self.path.partition("{")
        return [head + name for name in rest.rstrip("}").split(",")] if brace else [self.path]


_C10D = "torch._C._distributed_c10d"
_STARTS = 'init_process_group("hora") fails'
PRIVATE_NAMES = (
    # torch.distributed: the classes and functions that it exports under no public name, or not in every build.
    PrivateName(
        f"{_C10D}.{{AllgatherOptions,AllreduceCoalescedOptions,AllreduceOptions,AllToAllOptions,BarrierOptions,"
        "BroadcastOptions,GatherOptions,ReduceOptions,ReduceScatterOptions,ScatterOptions}",
        _STARTS,
    ),
    PrivateName(f"{_C10D}.{{Backend,Backend.Options,ErrorType,DebugLevel,get_debug_level}}", _STARTS, (2, 7)),
    PrivateName(
        f"{_C10D}.{{PrefixStore,Store,TCPStore,HashStore}}", "ranks that torchrun or mpirun starts do not meet"
    ),
    PrivateName(f"{_C10D}.GradBucket", "hora.elastic.protect fails"),
    PrivateName(
        "torch.distributed.distributed_c10d._get_default_store", "hvd.init() in a torch.distributed program fails"
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._world.{pg_map,pg_backend_config}", "--replace-gloo names the backend hora"
    ),
    PrivateName("torch.distributed.distributed_c10d._world.pg_group_ranks", "groups do not follow into another world"),
    PrivateName("torch.distributed.tensor.debug._clear_sharding_prop_cache", "a ShardedState cannot be imported"),
    PrivateName("torch.distributed.distributed_c10d._world.group_count", "a ShardedState cannot enter another world"),
    PrivateName("torch.distributed.distributed_c10d._new_process_group_helper", "--replace-gloo fails"),
    PrivateName(
        "torch.distributed.distributed_c10d._create_process_group_wrapper",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL fails",
        (2, 7),
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS",
        "torch attaches no recorder of its own",
        (2, 15),
    ),
    PrivateName("torch.distributed.rendezvous._rendezvous_handlers", "env:// reads torchrun's variables alone"),
    # What watches a call.
    PrivateName(f"{_C10D}.FakeProcessGroup", "before 2.14, CommDebugMode does not count calls", (2, 7)),
    PrivateName(f"{_C10D}._allow_inflight_collective_as_graph_input", _STARTS, (2, 7)),
    PrivateName("torch._C._autograd._profiler_enabled", _STARTS),
    PrivateName("torch._C._len_torch_dispatch_stack", _STARTS),
    PrivateName("torch._C._profiler._RecordFunctionFast", "a profiled call fails", (2, 7)),
    # torch.compile.
    PrivateName(
        "torch._C._dynamo.eval_frame.set_code_exec_strategy", "torch.compile traces into Hora: it is slow", (2, 7)
    ),
    PrivateName(
        "torch._C._dynamo.eval_frame.{_FrameAction,_FrameExecStrategy}", "torch.compile fails at a call", (2, 7)
    ),
    # Optimizers and modules.
    PrivateName("torch._C._storage_Use_Count", "hvd.DistributedOptimizer fails"),
    PrivateName("torch._C._current_graph_task_id", "hora.elastic.protect fails"),
    PrivateName("torch.autograd.Variable._execution_engine.queue_callback", "hora.elastic.protect fails"),
    PrivateName("torch.{_foreach_copy_,_foreach_mul_,_foreach_norm,_foreach_sub_,_foreach_zero_}", "optimizers fail"),
    PrivateName(
        "torch.nn.modules.batchnorm.{_BatchNorm,_NormBase}", "hvd.SyncBatchNorm and the comparison of buffers fail"
    ),
    PrivateName("torch.optim.optimizer._global_optimizer_pre_hooks", "hvd.ShardedOptimizer calls no global hooks"),
    PrivateName("torch._C._nn", "activations of torch's C++ are not among the functions of a saved model"),
)
