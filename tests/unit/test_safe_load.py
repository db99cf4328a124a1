"""The reader of pickles and `torch.save` files reads their data and calls no function that they name."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from hora.safe_load import ForeignError, Vocabulary, load_pickle, load_torch

BASE = torch.arange(100.0)
VALUES: dict[str, Any] = {
    "plain": [1, 2**70, -3, 1.5, None, True, "text", b"bytes", (), (1,), (1, 2), (1, 2, 3, 4), {"a": {"b": []}}],
    "collections": [collections.OrderedDict(x=1), collections.defaultdict(dict, {1: {}}), {1, 2}, frozenset({1})],
    "builtins": [slice(1, None, 2), range(3), 1 + 2j, bytearray(b"zz"), int],
    "floats": [torch.randn(3, 4), torch.randn(3, 4).t(), torch.randn(5).bfloat16(), torch.tensor(3.0).double()],
    "others": [torch.arange(5, dtype=torch.int8), torch.tensor([True, False]), torch.randn(2, dtype=torch.complex64)],
    "empty": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    "torch": [torch.Size([2, 3]), torch.device("cpu"), torch.float16],
    "arrays": [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.empty((0, 2))],
    "numbers": [np.int64(5), np.float64(0.5), np.array(["ab", "c"]), np.arange(3, dtype=">i4"), np.array([True])],
    "state": torch.nn.Linear(2, 2).state_dict(),
    "views": [BASE[3:7], BASE[::2]],
}


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        layout = (one.dtype, one.shape, one.stride(), one.requires_grad)
        return layout == (other.dtype, other.shape, other.stride(), other.requires_grad) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5, None])
def test_pickles_of_data(name, protocol):
    value = {name: VALUES[name]}
    data = cloudpickle.dumps(value) if protocol is None else pickle.dumps(value, protocol)
    assert same(load_pickle(data).plain(), value)


@pytest.mark.parametrize("archive", [True, False])
def test_files_of_torch(archive):
    values = VALUES if archive else {name: value for name, value in VALUES.items() if name != "views"}
    file = io.BytesIO()
    torch.save(values, file, _use_new_zipfile_serialization=archive)
    found = load_torch(file.getvalue()).plain()
    assert same(found, values)
    assert found["state"]._metadata == VALUES["state"]._metadata
    if archive:
        first, second = found["views"]
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_newer_dtypes():
    values = {"float8": torch.randn(4).to(torch.float8_e4m3fn)}
    if not torch.__version__.startswith("2.3."):  # torch.save supports uint16 since 2.4
        values["half a byte more"] = torch.arange(3).to(torch.uint16)
    file = io.BytesIO()
    torch.save(values, file)
    found = load_torch(file.getvalue()).plain()
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def _object_array() -> bytes:
    """Pickle a call of the array class with an object dtype and bytes in place of pointers."""
    dtype = b"cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R"
    return b"\x80\x03cnumpy\nndarray\n(K\x01\x85" + dtype + b"C\x08AAAAAAAAtR."


def _called(name: str, args: bytes = b")") -> bytes:
    return b"\x80\x04c" + name.replace(" ", "\n").encode() + b"\n" + args + b"R."


HOSTILE = {
    "a function": pickle.dumps(Bomb()),
    "a function of old": pickle.dumps(Bomb(), 0),
    "objects for an array": _object_array(),
    "objects for an array's state": pickle.dumps(np.array([Bomb], dtype=object)),
    "a constructor of arrays": _called("numpy ndarray", b"K\x01\x85\x85"),
    "an import": _called("torch.hub load"),
    "an attribute of an attribute": b"\x80\x04\x8c\x11torch.nn.functional\x8c\x09os.system\x93.",
    "a registered extension": b"\x80\x02\x82\x01.",
    "an instance with arguments": b"\x80\x02c__builtin__\nset\n(K\x01I2\nt\x81.",
    "a state for a class": b"\x80\x02ccollections\nOrderedDict\n}b.",
    "a tensor's state": b"\x80\x02ctorch\nTensor\n)\x81}b.",
    "a list in the place of a set": b"\x80\x04]\x94(K\x01\x90.",
    "a name that is no text": b"\x80\x04K\x01K\x02\x93.",
    "a reference to another file": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "nothing": b"",
    "no end": b"\x80\x02]",
    "a memo that is none": b"\x80\x02h\x07.",
    "a mark that is none": b"\x80\x02t.",
    "a storage of negative size": _called("torch Size", b"(J\xff\xff\xff\xfft\x85"),
    "a factory": _called("collections defaultdict", b"cposix\nsystem\n\x85"),
    "a class that torch declares harmless": _called(
        "torch.distributed.device_mesh DeviceMesh", b"(X\x03\x00\x00\x00cpuK\x00\x85t"
    ),
    "a type of arrays that is an expression": _called("numpy dtype", b"X\x04\x00\x00\x00(1,)\x85"),
    "bytes by another codec": _called("_codecs encode", b"X\x01\x00\x00\x00aX\x03\x00\x00\x00zip\x86"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_run_nothing_and_are_rejected(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"\w"):
        load_pickle(HOSTILE[name]).plain()
    with pytest.raises(ValueError, match=r"\w"):
        load_torch(HOSTILE[name]).plain()
    assert os.listdir() == []


def test_instances_get_attributes_and_no_methods():
    def known(module: str, name: str) -> type | None:
        return torch.nn.Linear if (module, name) == ("torch.nn.modules.linear", "Linear") else None

    vocabulary = Vocabulary(instance_class=known)
    model = torch.nn.Linear(2, 1)
    found = load_pickle(pickle.dumps(model), vocabulary).plain()
    assert same(dict(found.state_dict()), dict(model.state_dict()))
    model.forward = print  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="other methods than its class"):
        load_pickle(pickle.dumps(model), vocabulary)
    del model.forward
    model._forward_hooks[0] = int
    with pytest.raises(ValueError, match="has hooks"):
        load_pickle(pickle.dumps(model), vocabulary)
    with pytest.raises(ValueError, match=r"it calls .*, which data does not need"):
        load_pickle(_called("torch.nn.modules.linear Linear", b"K\x02K\x01\x86"), vocabulary)


def test_foreign_parts_are_named_and_the_rest_can_be_used():
    file = io.BytesIO()
    torch.save({"weights": BASE, "hyper_parameters": {"x": Bomb()}, "own": [Bomb()]}, file)
    loaded = load_torch(file.getvalue())
    with pytest.raises(ForeignError, match=r"^posix\.mkdir$"):
        loaded.without("hyper_parameters").plain()
    assert same(loaded.without("hyper_parameters", "own").plain(), {"weights": BASE})
    with pytest.raises(ValueError, match="holds a list, not a dictionary"):
        load_pickle(pickle.dumps([])).without("a")


def zipped(entries: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


def _archive(pickled: bytes, data: bytes = b"", **entries: bytes) -> bytes:
    return zipped({f"a/{name}": one for name, one in {"data.pkl": pickled, "data/0": data, **entries}.items()})


def _tensor(num_elements: int, offset: int, size: int, stride: int, *, key: bytes = b"0") -> bytes:
    """Return the pickle of a tensor with arbitrary sizes and offsets."""
    number = lambda value: b"J" + value.to_bytes(4, "little", signed=True)  # noqa: E731
    text = lambda value: b"X" + len(value).to_bytes(4, "little") + value  # noqa: E731
    storage = (
        b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(key) + text(b"cpu") + number(num_elements) + b"tQ"
    )
    shape = number(offset) + number(size) + b"\x85" + number(stride) + b"\x85"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + shape + b"\x89NtR."


def test_a_tensor_stays_inside_its_storage():
    assert load_torch(_archive(_tensor(4, 1, 3, 1), bytes(16))).plain().shape == (3,)
    for numbers in (
        (4, 2, 3, 1),
        (4, 0, 4, 2),
        (4, -1, 3, 1),
        (4, 0, -3, 1),
        (4, 0, 2, -1),
        (3, 0, 3, 1),
        (8, 0, 8, 1),
    ):
        with pytest.raises(ValueError, match=r"beyond its storage|other than sizes|has 16 bytes"):
            load_torch(_archive(_tensor(*numbers), bytes(16)))
    with pytest.raises(ValueError, match="byte order"):
        load_torch(_archive(_tensor(4, 0, 4, 1), bytes(16), byteorder=b"big"))


def _overlapping(num_storages: int, num_bytes: int) -> bytes:
    """Return an archive in which each storage contains all later ones, with their headers."""
    body, entries = bytes(num_bytes), []
    for key in reversed(range(num_storages)):
        name, size, crc = f"a/data/{key}".encode(), len(body), zlib.crc32(body)
        entries.append((name, size, crc))
        body = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 33, crc, size, size, len(name), 0) + name + body
    entries.reverse()
    tensors = [_tensor(size // 4, 0, 1, 1, key=name[7:])[2:-1] for name, size, _ in entries]
    pickled = b"\x80\x02](" + b"".join(tensors) + b"e."
    first = _archive(pickled)
    first = first[: first.index(b"PK\3\4", 4)]  # of data.pkl alone
    directory, offset = b"", len(first)
    for name, size, crc in [(b"a/data.pkl", len(pickled), zlib.crc32(pickled)), *entries]:
        at = 0 if name == b"a/data.pkl" else offset
        directory += struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 33, crc, size, size, len(name), 0, 0, 0, 0, 0, at
        )
        directory += name
        offset += 30 + len(name) if at else 0
    count = num_storages + 1
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), len(first) + len(body), 0)
    return first + body + directory + end


def test_entries_that_overlap_are_rejected():
    """On Python before 3.11.8, whose zipfile reads them: a small file would need a multiple of its size."""
    with pytest.raises(ValueError, match=r"not a file of torch.save: .*[Oo]verlap"):
        load_torch(_overlapping(100, 10_000))


@pytest.mark.parametrize("value", ["bytearray", "list", "array", "storage"])
def test_copies_of_one_object_are_limited(value):
    """A pickle refers to an object of 100 KB a thousand times, and has it copied each time."""
    many = b"B" + struct.pack("<I", 100_000) + bytes(100_000) + b"q\x00"
    copied = b"c__builtin__\nbytearray\nh\x00\x85R"
    if value == "list":
        many, copied = b"](" + b"K\x00" * 100_000 + b"eq\x00", b"c__builtin__\nlist\nh\x00\x85R"
    elif value == "array":
        dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R"
        copied = b"cnumpy._core.numeric\n_frombuffer\n(h\x00" + dtype + b"J\xa0\x86\x01\x00\x85X\x01\x00\x00\x00CtR"
    elif value == "storage":
        file = io.BytesIO()
        torch.save(torch.zeros(100_000, dtype=torch.uint8).untyped_storage(), file)
        inner = file.getvalue()
        many = b"B" + struct.pack("<I", len(inner)) + inner + b"q\x00"
        copied = b"ctorch.storage\n_load_from_bytes\nh\x00\x85R"
    assert load_pickle(b"\x80\x03" + many + copied * 2 + b".").plain() is not None
    with pytest.raises(ValueError, match="copied again and again"):
        load_pickle(b"\x80\x03" + many + (copied + b"0") * 1000 + b".")


def test_a_storage_of_the_old_format_is_as_long_as_its_file():
    file = io.BytesIO()
    torch.save({"a": torch.zeros(1000), "b": torch.ones(1000)}, file, _use_new_zipfile_serialization=False)
    whole = file.getvalue()
    assert load_torch(whole).plain()["b"].sum() == 1000
    for damaged in (
        whole.replace(b"M\xe8\x03", b"M\xd0\x07"),  # twice the elements: together more than the file has
        whole[:-10],
        whole.replace(b"little_endian", b"other_endian_"),
        whole.replace(b"protocol_versionq", b"protocol_versio\xffq"),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            load_torch(damaged)


LEGACY = [
    pickle.dumps(one, 2) for one in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": sys.byteorder == "little"}, [])
]
NO_FILES = {
    "a list in the place of the machine": b"".join([*LEGACY[:2], *LEGACY[3:]]),
    "a number in the place of the keys": b"".join([*LEGACY, pickle.dumps(5, 2)]),
    "keys that are lists": b"".join([*LEGACY, pickle.dumps([[]], 2)]),
    "an archive without a pickle": zipped({"a/byteorder": b"little"}),
    "an archive that ends early": zipped({"a/data.pkl": b"\x80\x02N."}).replace(b"\x80\x02N.", b""),
}


@pytest.mark.parametrize("name", NO_FILES)
def test_other_files_are_rejected_with_a_value_error(name):
    with pytest.raises(ValueError, match=r"\w"):
        load_torch(NO_FILES[name])


def test_damaged_files_are_read_or_rejected(cases):
    """Pickles and archives with random changes raise ValueError or load; they neither crash nor raise other errors."""
    file = io.BytesIO()
    torch.save(VALUES, file)
    whole = [pickle.dumps({"v": VALUES[name]}, protocol) for name in VALUES for protocol in (2, 5)]
    whole += [*HOSTILE.values(), *NO_FILES.values(), file.getvalue()]
    for case, chance in cases:
        data = bytearray(chance.choice(whole))
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(data) or 1)
            data[at : at + chance.randrange(2)] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 3)))
        for load in (load_pickle, load_torch):
            try:
                load(bytes(data))
            except ValueError:
                continue
            except Exception as error:
                pytest.fail(f"{case}: {error!r}")
