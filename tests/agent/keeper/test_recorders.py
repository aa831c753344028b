"""Who is asked to find out whether a script can be cut."""

from agent.keeper.roster import AGAIN_S, AGAIN_S_MAX, LOSSES_MAX, Recorders


def lose(recorders: Recorders, name: str, now_s: float, *, announced: bool = False) -> None:
    recorders.begin(name)
    recorders.lost(name, now_s, announced=announced)


def test_after_a_few_losses_it_is_asked_again_ever_more_seldom() -> None:
    """Two may have died of it: nobody is asked for a while, then one more; and never is it given up for good."""
    recorders, now_s, pauses = Recorders(), 0.0, []
    for number in range(LOSSES_MAX):
        assert recorders.wanted(now_s)
        lose(recorders, f"w{number}", now_s)
    for number in range(20):
        began_s = now_s
        while not recorders.wanted(now_s):
            now_s += AGAIN_S / 2
        pauses.append(now_s - began_s)
        lose(recorders, f"v{number}", now_s)
    assert pauses[0] == AGAIN_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == AGAIN_S_MAX


def test_what_the_cloud_takes_is_not_what_recording_killed() -> None:
    """A machine that goes as announced, and a worker that had not begun, count for nothing."""
    recorders = Recorders()
    for number in range(10):
        lose(recorders, f"w{number}", 0.0, announced=True)
        recorders.lost(f"v{number}", 0.0, announced=False)
    assert recorders.wanted(0.0)


def test_who_is_interrupted_and_lives_does_not_count() -> None:
    """Leaders that change before they are done have not died of it."""
    recorders = Recorders()
    for number in range(10):
        recorders.begin(f"w{number}")
    assert recorders.wanted(0.0)


def test_what_was_found_out_is_not_asked_for_again() -> None:
    """Somebody has said it; losses after that change nothing."""
    recorders = Recorders()
    recorders.begin("w1")
    recorders.told = True
    assert not recorders.wanted(0.0)
