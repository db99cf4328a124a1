"""The estimates of `hora plan`, for given links and models."""

from __future__ import annotations

import pytest

from hora.torch.capacity_plan import NetworkLink, StepWork, advice, predict, table

WIDE = StepWork(
    step_s=0.1,
    backward_s=0.05,
    shapes=((2048, 2048), (2048,), (2048, 2048), (2048,), (10, 2048), (10,)),
    factor_s={1: 0.01, 2: 0.01, 4: 0.015, 8: 0.02},
)


def link(megabits: float, latency_s: float, num_hosts: int = 2) -> NetworkLink:
    byte_s = 8 / (megabits * 1e6)
    return NetworkLink(
        num_hosts=num_hosts, latency_s=latency_s, byte_s=byte_s, bf16_byte_s=byte_s / 2, int8_byte_s=byte_s / 4
    )


def by_name(link: NetworkLink, work: StepWork = WIDE) -> dict[str, float]:
    return {row.name: row.step_s for row in predict(link, work)}


def test_every_setting_has_a_row_with_its_code():
    rows = predict(link(100, 0.04), WIDE)
    assert [row.name for row in rows] == [
        *("plain", "bf16", "int8", "PowerSGD 1", "PowerSGD 2", "PowerSGD 4", "PowerSGD 8"),
        *("DiLoCo 10", "DiLoCo 50", "DiLoCo 200"),
    ]
    assert all("hvd." in row.line and row.accuracy for row in rows)
    shown = table(link(100, 0.04), WIDE, rows).splitlines()
    assert "100 Mbit/s" in shown[0]
    assert "33.7 MB" in shown[0]
    assert len(shown) == 3 + len(rows)


def test_the_advice_names_the_fastest_of_each_kind():
    told = advice(predict(link(100, 0.04), WIDE))
    assert told.startswith("plan: a step takes ")
    for line in ("Compression.int8", "powersgd(rank=1)", "hvd.DiLoCo(optimizer, every="):
        assert line in told
    assert "bf16" not in told


def test_on_a_slow_link_the_bytes_dominate_the_step():
    found = by_name(link(100, 0.001))
    wire_s = WIDE.num_bytes * 8 / 100e6
    assert found["plain"] == pytest.approx(WIDE.step_s + wire_s, rel=0.05)
    assert found["bf16"] == pytest.approx(WIDE.step_s + wire_s / 2, rel=0.06)
    assert found["plain"] > found["bf16"] > found["int8"] > found["PowerSGD 4"]


def test_on_a_long_link_round_trips_dominate_the_step():
    found = by_name(link(10_000, 0.1))
    assert found["PowerSGD 4"] == pytest.approx(WIDE.step_s + 0.015 + 0.2, rel=0.02)
    assert found["DiLoCo 200"] == pytest.approx(WIDE.step_s)
    assert found["DiLoCo 10"] < found["PowerSGD 1"]


def test_on_a_fast_link_only_the_last_bucket_is_waited_for():
    found = by_name(link(100_000, 0.0001))
    assert found["plain"] < 1.02 * WIDE.step_s
    assert found["PowerSGD 4"] > found["plain"]


def test_more_hosts_send_more_bytes():
    two, four = (predict(link(100, 0.01, num_hosts=n), WIDE) for n in (2, 4))
    assert four[0].wire_bytes == pytest.approx(1.5 * two[0].wire_bytes)
