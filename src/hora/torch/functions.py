"""Synchronize state between ranks: broadcast parameters and objects from a root, gather objects from all ranks.

Objects are sent as cloudpickle bytes with a MAC. Only the ranks of this world hold its key. The transport may accept
strangers (gloo does), so a rank verifies the sender before it unpickles anything. `optimizer.state` broadcasts
optimizer state.
"""

from __future__ import annotations

import hmac
import traceback
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import cloudpickle
import torch

from hora import engine
from hora.errors import HorovodInternalError
from hora.torch.basics import engine_rank
from hora.torch.collective import synchronize
from hora.torch.ops import allgather_async, broadcast_, broadcast_async, broadcast_async_
from hora.torch.process_sets import ProcessSet, global_process_set

_MAC_BYTES = 32

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters", "broadcast_tensors"]


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite parameters with the root's.

    Args:
        params: A state dict, or any iterable of tensors or pairs of a name and a tensor.
        root_rank: The rank whose value everyone gets.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    handles = [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in _named_tensors(params)]
    for handle in handles:
        synchronize(handle)


def _named_tensors(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        pairs = sorted(((str(name), tensor) for name, tensor in params.items()), key=itemgetter(0))
    elif isinstance(params, torch.Tensor) or not hasattr(params, "__iter__"):
        raise ValueError(f"invalid params of type {type(params).__name__}: pass a state_dict or a list of parameters")
    else:
        # Unnamed tensors are numbered; the order is the same on all ranks.
        pairs = [p if isinstance(p, tuple) else (f"parameter.{i}", p) for i, p in enumerate(params)]
    names: set[str] = set()
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[1], torch.Tensor):
            raise ValueError(
                f"invalid params: every entry must be a tensor or (name, tensor), but one is {pair!r:.100}"
            )
        if pair[0] in names:
            raise ValueError(f"invalid params: the name {pair[0]!r} occurs twice; names must be unique")
        names.add(pair[0])
    return pairs


def broadcast_tensors(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the root's tensors; raises ValueError on all ranks if one has another number or shape of tensors."""
    name = "broadcast_tensors" if name is None else name
    mine = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]
    described = dict(zip(process_set.ranks or (), allgather_object(mine, f"{name}.shapes", process_set), strict=True))
    if root_rank in described:  # otherwise the broadcast reports it
        for other, shapes in described.items():
            _check_alike(described[root_rank], shapes, root_rank, other)
    handles = [broadcast_async(tensor, root_rank, f"{name}.{i}", process_set) for i, tensor in enumerate(tensors)]
    return [synchronize(handle) for handle in handles]


def _check_alike(of_root: list[Any], of_other: list[Any], root_rank: int, other: int) -> None:
    if len(of_root) != len(of_other):
        raise ValueError(
            f"ranks have different variables: rank {root_rank} has {len(of_root)} of them, rank {other} "
            f"{len(of_other)}; build the same model on all ranks before the broadcast"
        )
    for i, (wanted, found) in enumerate(zip(of_root, of_other, strict=True)):
        if wanted != found:
            raise ValueError(
                f"ranks have different variables: number {i} has shape {wanted[0]} and dtype {wanted[1]} on rank "
                f"{root_rank}, but {found[0]} and {found[1]} on rank {other}; build the same model on all ranks"
            )


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on all ranks; the root gets its own object back. Pickles with cloudpickle.

    Args:
        obj: Any object that pickles.
        root_rank: The rank whose value everyone gets.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    # The default name must not depend on the object: non-root ranks usually pass None.
    name = "broadcast_object" if name is None else name
    on_root = engine_rank() == root_rank
    header, payload, failure = _pickle(obj if on_root else None)
    broadcast_(header, root_rank, f"{name}.size", process_set)
    num_bytes = int(header)
    if not on_root:
        payload = torch.empty(abs(num_bytes), dtype=torch.uint8, device="cpu")
    broadcast_(payload, root_rank, f"{name}.data", process_set)
    if failure is not None:
        raise failure
    return obj if on_root else _unpickle(payload, num_bytes < 0, root_rank)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Args:
        obj: Any object that pickles.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    name = "allgather_object" if name is None else name
    header, payload, failure = _pickle(obj)
    parts = {"size": header, "data": payload}
    handles = [allgather_async(part, f"{name}.{what}", process_set) for what, part in parts.items()]
    sizes, data = [synchronize(handle) for handle in handles]
    if failure is not None:
        raise failure
    found = data.split([abs(n) for n in sizes.tolist()])
    ranks = process_set.ranks or range(len(found))
    return [_unpickle(part, n < 0, r) for part, n, r in zip(found, sizes.tolist(), ranks, strict=True)]


def _pickle(obj: Any) -> tuple[torch.Tensor, torch.Tensor, Exception | None]:
    """Return the number of the object's bytes and the bytes, or the text of the error if it cannot be pickled, with a
    negative number: the peers wait for either.
    """
    failure: Exception | None = None
    try:
        data = cloudpickle.dumps(obj)
    except Exception as error:  # raised by the object's __reduce__; re-raised after the peers know
        failure = error
        data = "".join(traceback.format_exception_only(type(error), error)).encode() or b"unknown"
    mac = _mac(data, engine_rank(), failed=failure is not None)
    payload = torch.frombuffer(bytearray(mac + data), dtype=torch.uint8)
    header = torch.tensor([-len(payload) if failure else len(payload)], dtype=torch.int64, device="cpu")
    return header, payload, failure


def _mac(data: bytes, sender: int, *, failed: bool) -> bytes:
    key = engine.current_runtime().secret_for("objects")
    return hmac.digest(key, f"{sender} {failed} ".encode() + data, "sha256")


def _unpickle(payload: torch.Tensor, failed: bool, sender: int) -> Any:
    received = payload.numpy().tobytes()
    mac, data = received[:_MAC_BYTES], received[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(data, sender, failed=failed)):
        raise HorovodInternalError(
            f"the object received from rank {sender} failed authentication: it was modified in transit or sent by a "
            "stranger; it has not been unpickled"
        )
    if failed:
        raise HorovodInternalError(
            f"rank {sender} could not pickle its object: {data.decode(errors='replace').strip()}"
        )
    return cloudpickle.loads(data)
