"""Datasets of a store that several applications use at the same time."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from hora.spark.estimator.claims import Claim
from horovod.spark.common.store import Store


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    return Store.create(str(tmp_path / "store") if request.param == "file" else f"memory://{tmp_path.name}")


def test_one_application_has_a_dataset_at_a_time(store):
    first = Claim.acquire(store, 0)
    assert first is not None
    assert Claim.acquire(store, 0) is None
    other = Claim.acquire(store, 1)
    assert other is not None
    first.close()
    first.close()
    again = Claim.acquire(store, 0)
    assert again is not None
    again.close()
    other.close()


def test_claims_leave_nothing_behind(tmp_path):
    claim = Claim.acquire(Store.create(str(tmp_path)), 0)
    assert len(list(tmp_path.rglob("*"))) == 2  # the folder and the file
    claim.close()
    assert not list(tmp_path.rglob("*"))


def test_a_claim_of_an_application_that_died_does_not_count(tmp_path):
    store = Store.create(str(tmp_path))
    abandoned = Path(store.get_localized_path(store.get_train_data_path(0)) + ".users") / "abandoned"
    abandoned.parent.mkdir(parents=True)
    abandoned.write_text(repr(time.time() - 3600))
    claim = Claim.acquire(store, 0)
    assert claim is not None
    claim.close()
    abandoned.write_text("")  # it is being written
    assert Claim.acquire(store, 0) is None


def test_of_applications_that_come_together_at_most_one_gets_it(tmp_path):
    for number in range(20):
        barrier, got = threading.Barrier(4), []

        def application(barrier=barrier, got=got, folder=tmp_path / str(number)):
            store = Store.create(str(folder))
            barrier.wait(30)
            got.append(Claim.acquire(store, 0))

        threads = [threading.Thread(target=application) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        winners = [claim for claim in got if claim is not None]
        assert len(got) == 4
        assert len(winners) <= 1
        for claim in winners:
            claim.close()
