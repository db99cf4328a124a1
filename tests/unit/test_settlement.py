"""What the survivors of a world agree on, from their reports alone."""

from __future__ import annotations

from hora.torch.protection.settlement import Report, settle


def report(worker: int, next_call: int, *, unfinished=(), kept=(), boundary=-1, is_member=True, digest="d") -> Report:
    return Report(
        worker=worker,
        is_member=is_member,
        group="0",
        digest=digest,
        next_call=next_call,
        unfinished=tuple(unfinished),
        kept=tuple(kept),
        boundary=boundary,
    )


def newcomer(worker: int, digest: str = "d") -> Report:
    return report(worker, 0, is_member=False, digest=digest)


def test_a_report_arrives_as_it_was_sent():
    sent = report(3, 9, unfinished=(7, 8), kept=(5, 6), boundary=7)
    assert Report.decode(sent.encode()) == sent


def test_a_result_that_one_survivor_has_is_copied_and_the_others_are_repeated():
    first = report(0, 6, unfinished=[4, 5], kept=[2, 3])
    second = report(2, 6, unfinished=[3, 4, 5], kept=[2])
    found = settle([first, second])
    assert found.copies == ((3, 0),)
    assert found.repeated == (4, 5)


def test_a_rank_that_is_in_the_next_step_gives_the_means_of_the_last_one():
    ahead = report(1, 9, unfinished=[8], kept=[4, 5, 6, 7], boundary=8)
    behind = report(4, 8, unfinished=[6, 7], kept=[4, 5], boundary=4)
    assert settle([behind, ahead]).copies == ((6, 1), (7, 1))
    assert settle([behind, ahead]).repeated == (8,)


def test_a_result_that_nobody_keeps_is_lost():
    found = settle([report(0, 6, unfinished=[5]), report(1, 5, unfinished=[4])])
    assert found.lost == (4,)
    assert found.repeated == (5,)


def test_newcomers_come_in_between_two_steps_alone():
    at_boundary = [report(0, 8, boundary=8), report(1, 9, unfinished=[8], boundary=8), newcomer(5)]
    found = settle(at_boundary)
    assert (found.admitted, found.teacher) == ((2,), 0)
    # A rank that is a step behind gets the means of that step, and then is where the others are.
    behind = [report(0, 8, kept=[6, 7], boundary=8), report(1, 8, unfinished=[7], boundary=4), newcomer(5)]
    assert settle(behind).admitted == (2,)
    assert settle(behind).copies == ((7, 0),)
    # In the middle of a step they wait for its end.
    amid = [report(0, 10, unfinished=[9], kept=[8], boundary=8), report(1, 10, unfinished=[9], boundary=8), newcomer(5)]
    assert settle(amid).admitted == ()
    assert settle([report(0, 8, boundary=-1), newcomer(5)]).admitted == ()


def test_a_newcomer_with_another_model_is_not_admitted():
    assert settle([report(0, 8, boundary=8), newcomer(5, "other"), newcomer(6)]).admitted == (2,)
