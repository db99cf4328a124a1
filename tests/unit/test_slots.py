"""Host lists, host files and the slots of ranks: pure functions, tested with arbitrary input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hora.launch.slots import (
    HostInfo,
    Slot,
    get_host_assignments,
    parse_host_files,
    parse_hosts,
    parse_hosts_and_slots,
)


def test_hosts_are_read_in_order_with_blanks_around_commas():
    assert parse_hosts("a:1, b-2.example.com:3 ,c_3:0") == [
        HostInfo("a", 1),
        HostInfo("b-2.example.com", 3),
        HostInfo("c_3", 0),
    ]
    assert parse_hosts_and_slots("a:1,b:2") == (["a", "b"], {"a": 1, "b": 2})


@pytest.mark.parametrize(
    "text", ["a", "a:", ":2", "a:b", "a:1,", "", "a:1 b:2", "a:-1", "a:1:2", "a b:1", "a:1.5", "-v:1"]
)
def test_malformed_hosts_are_rejected_with_the_expected_format(text):
    with pytest.raises(ValueError, match=r"Invalid host input.*name:slots"):
        parse_hosts(text)


def test_hostfile_skips_blanks_and_comments_and_defaults_to_one_slot(tmp_path):
    path = tmp_path / "hosts"
    path.write_text(
        "# our cluster\n\nnode1 slots=4\n  node2   slots = 2  # half\nnode3\nnode4:3\nnode5 slots=2 max_slots=4\n"
    )
    assert parse_host_files(str(path)) == "node1:4,node2:2,node3:1,node4:3,node5:2"


@pytest.mark.parametrize("line", ["node1 slots=x", "node1 slots", "node1:x", "node 1 slots=2", "node1 slots=4 max=8"])
def test_a_bad_hostfile_line_is_named(tmp_path, line):
    path = tmp_path / "hosts"
    path.write_text(f"node0 slots=1\n{line}\n")
    with pytest.raises(ValueError, match=r"line 2.*slots=N"):
        parse_host_files(path)


def test_unusable_hostfiles_are_explained(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        parse_host_files(tmp_path / "nowhere")
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ValueError, match="names no host"):
        parse_host_files(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        parse_host_files(tmp_path / "binary")


def test_ranks_fill_hosts_in_order_and_cross_ranks_count_hosts():
    assert get_host_assignments(parse_hosts("a:1,b:2"), 3) == [
        Slot("a", rank=0, local_rank=0, cross_rank=0, size=3, local_size=1, cross_size=2),
        Slot("b", rank=1, local_rank=0, cross_rank=1, size=3, local_size=2, cross_size=2),
        Slot("b", rank=2, local_rank=1, cross_rank=0, size=3, local_size=2, cross_size=1),
    ]


def test_no_more_slots_than_requested():
    slots = get_host_assignments(parse_hosts("a:2,b:2"), 3, 3)
    assert [(s.hostname, s.local_rank, s.local_size) for s in slots] == [
        ("a", 0, 2),
        ("a", 1, 2),
        ("b", 0, 1),
    ]
    assert len(get_host_assignments(parse_hosts("a:1000000000000"), 2, 2)) == 2


def test_too_few_slots_name_both_numbers_and_the_hosts():
    with pytest.raises(
        ValueError, match=r"Requested more processes \(5\) than there are available slots \(3\).*a:1,b:2"
    ):
        get_host_assignments(parse_hosts("a:1,b:2"), 5, 5)


def test_a_host_named_twice_has_the_sum_of_its_slots():
    slots = get_host_assignments(parse_hosts("a:1,b:1,a:1"), 3)
    assert [(s.hostname, s.local_rank) for s in slots] == [("a", 0), ("a", 1), ("b", 0)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.data())
def test_every_assignment_is_consistent(counts, data):
    hosts = [HostInfo(f"h{i}", count) for i, count in enumerate(counts)]
    size = data.draw(st.integers(0, sum(counts)))
    slots = get_host_assignments(hosts, size, size)
    assert [s.rank for s in slots] == list(range(size))
    assert len({(s.hostname, s.local_rank) for s in slots}) == size
    for slot in slots:
        mates = [s for s in slots if s.hostname == slot.hostname]
        twins = [s for s in slots if s.local_rank == slot.local_rank]
        assert slot.size == size
        assert slot.local_size == len(mates)
        assert [s.local_rank for s in mates] == list(range(len(mates)))
        assert (slot.cross_rank, slot.cross_size) == (twins.index(slot), len(twins))
