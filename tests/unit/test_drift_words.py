"""Digests of tensors, their comparison by sums, and the words for a difference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hora.torch.drift.buffers import buffers_beside
from hora.torch.drift.difference import of_settings, of_tensor
from hora.torch.drift.digest import all_equal, digest, flat, sums_of
from hora.torch.drift.watch import DriftSettings, Rotation, is_local, plain


@pytest.mark.parametrize("count", [0, 1, 7, 1000, 40_001])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64, torch.bool]
)
def test_a_digest_depends_on_every_bit_and_its_place(count, dtype):
    torch.manual_seed(0)
    tensor = (torch.randn(count) * 10).to(dtype)
    assert digest(tensor) == digest(tensor.clone())
    if count < 2:
        return
    other = tensor.clone()
    other[-1] = other[-1] + 1 if dtype is not torch.bool else ~other[-1]
    assert digest(tensor) != digest(other)
    tensor[0], tensor[-1] = 1, 0
    swapped = tensor.clone()
    swapped[0], swapped[-1] = 0, 1
    assert digest(tensor) != digest(swapped)


def test_a_digest_follows_the_memory():
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert flat(images).data_ptr() == images.data_ptr()
    assert sorted(flat(images).tolist()) == sorted(images.reshape(-1).tolist())
    assert flat(torch.randn(4, 6)[:, ::2]).shape == (12,)


@pytest.mark.parametrize("size", [2, 3, 1024])
def test_sums_tell_whether_all_digests_are_equal(size):
    generator = torch.Generator().manual_seed(0)
    for case in range(100):
        numbers = [int(torch.randint(2**62, (1,), generator=generator))] * size
        if case % 2:
            numbers[case % size] += 1 + case
        sums = [sum(its) for its in zip(*map(sums_of, numbers), strict=True)]
        assert max(sums) < 2**63
        assert all_equal(sums, size) == (not case % 2)


def test_every_part_has_its_turn_and_a_changed_one_is_found():
    tensors = [(f"p{number}", torch.randn(number * 700 + 1)) for number in range(9)]
    whole, parts = Rotation(), Rotation()
    whole.next_digest(tensors, 1.0, 0)
    assert whole.names == [name for name, _ in tensors]
    changed = [(name, tensor.clone()) for name, tensor in tensors]
    changed[4][1][-1] += 1
    others = Rotation()
    turns = [
        (parts.next_digest(tensors, 0.1, step), others.next_digest(changed, 0.1, step), parts.names)
        for step in range(10)
    ]
    assert {name for _, _, names in turns for name in names} == {name for name, _ in tensors}
    assert [names for one, other, names in turns if one != other]
    assert all("p4" in names for one, other, names in turns if one != other)


def test_hyperparameters_are_compared_as_numbers():
    assert plain(1) == plain(1.0) == plain(torch.tensor(1)) == 1.0
    assert plain((0.9, torch.tensor(0.5))) == [0.9, 0.5]
    assert plain(float("nan")) == plain(torch.tensor(float("nan"))) == "nan"
    assert plain(None) is None
    assert plain(True) is True
    assert plain(print) == "builtin_function_or_method"


def facts(rank, history=(), steps=5, **more):
    return {"rank": rank, "begin": 0, "steps": steps, "history": history, "machine": "", **more}


def test_the_words_for_hyperparameters():
    first = [[1, 0, "lr", 0.1], [1, 0, "betas", [0.9, 0.9]], [4, 0, "lr", 0.2]]
    other = [[1, 0, "lr", 0.1], [1, 0, "betas", [0.9, 0.9]], [3, 0, "lr", 0.2]]
    found = of_settings([facts(0, first), facts(1, first), facts(2, other), facts(3, first)])
    assert "since step 3: learning rate 0.2 on rank 2, 0.1 on ranks 0-1, 3: a scheduler" in found.text
    found = of_settings([facts(0, first), facts(1, [*first, [5, 0, "momentum", 0.5]])])
    assert (
        "since step 5: momentum not set on rank 0, 0.5 on rank 1" in found.text
        or "0.5 on rank 1, not set" in found.text
    )
    assert "number of applied steps is 4 on rank 1, 5 on rank 0" in of_settings([facts(0), facts(1, steps=4)]).text
    assert "in an earlier step" in of_settings([facts(0), facts(1)]).text


def test_the_words_for_tensors():
    agreed = {"parameters agreed": {"a": 64}}
    both = [facts(0, **agreed), facts(1, **agreed)]
    found = of_tensor("parameters", "a", ["a", "b"], both, [0.0, 0.5])
    assert "since a step after 64: parameter a and 1 more parameters on rank 1: not as on rank 0, by 50 %" in found.text
    assert not found.is_rounding
    assert "broadcast_parameters" in of_tensor("parameters", "b", ["b"], both, [0.0, 0.5]).text
    other = [both[0], {**both[1], "machine": "other"}]
    assert of_tensor("parameters", "a", ["a"], other, [0.0, 1e-7]).is_rounding
    assert not of_tensor("parameters", "a", ["a"], both, [0.0, 1e-7]).is_rounding


def test_the_model_is_found_by_its_named_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("cache", torch.ones(1), persistent=False)
    find = buffers_beside(model.named_parameters())
    assert [name for name, _ in find()] == ["kept"]
    assert list(buffers_beside(list(model.named_parameters()))()) == []
    assert list(buffers_beside(None)()) == []
    assert list(buffers_beside(pair for pair in model.named_parameters())()) == []
    del model
    assert list(find()) == []


def test_choices_and_names():
    with pytest.raises(ValueError, match="'raise'"):
        DriftSettings(on_drift="raise")
    with pytest.raises(ValueError, match="'lr'"):
        DriftSettings(local="lr")
    assert is_local("experts.0.weight", {"experts"})
    assert not is_local("experts2.weight", {"experts"})
