"""`HorovodRunner` recognises elastic functions by attribute and by their code."""

from __future__ import annotations

import functools

import horovod.torch as hvd
from hora.spark.runner import is_elastic
from horovod.torch.elastic import TorchState, run


def within():
    import horovod.torch as hvd

    state = hvd.elastic.TorchState(step=0)

    @hvd.elastic.run
    def loop(state):
        return state.step

    return loop(state)


def imported_within():
    from horovod.torch.elastic import TorchState, run

    return run(lambda state: state.step)(TorchState(step=0))


@hvd.elastic.run
def loop(state):
    return state.step


def of_the_module():
    return loop(hvd.elastic.TorchState(step=0))


def by_plain_names():
    return run(lambda state: state.step)(TorchState(step=0))


def through_another():
    return of_the_module()


def given(train):
    return train()


class Training:
    def __call__(self):
        return within()

    def fit(self):
        return self.__call__()


def plain():
    """Use neither hvd.elastic.run nor TorchState."""
    text = "hvd.elastic.TorchState"
    return text, hvd.allreduce


def test_code_that_uses_elastic_and_a_state_is_elastic():
    for function in (
        within,
        imported_within,
        of_the_module,
        by_plain_names,
        through_another,
        Training(),
        Training().fit,
    ):
        assert is_elastic(function), function
    assert is_elastic(functools.partial(given, within))
    assert is_elastic(given, {"train": within})
    closure = within
    assert is_elastic(lambda: closure())


def test_strings_and_data_do_not_make_a_function_elastic():
    assert not is_elastic(plain)
    assert not is_elastic(plain, {"note": "elastic State", "data": b"elastic State"})
    assert not is_elastic(print)
    assert not is_elastic(functools.partial(print, "elastic State"))


def test_the_attribute_elastic_takes_precedence():
    def opaque():
        return 1

    opaque.elastic = True
    assert is_elastic(opaque)

    def misread():
        return within()

    misread.elastic = False
    assert not is_elastic(misread)
