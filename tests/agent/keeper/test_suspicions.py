"""Of two that complain about each other only one is lost."""

from agent.keeper.roster import Suspicions


def test_one_of_two_is_lost() -> None:
    """Each says that the connection to the other broke; what the lost one said counts no more."""
    said = Suspicions()
    said.hear("a", "b", 1.0)
    said.hear("b", "a", 1.1)
    assert said.lost(0.9) is None
    assert said.lost(1.0) == ("b", "a")
    said.drop("b")
    assert said.lost(9.0) is None


def test_the_one_that_most_complain_about_is_lost() -> None:
    """Whoever has lost all its connections says it of everybody, and everybody says it of that one."""
    said = Suspicions()
    for peer in "bcd":
        said.hear(peer, "a", 1.0)
        said.hear("a", peer, 1.5)
    assert said.lost(1.0) == ("a", "b")
    said.drop("a")
    assert said.lost(9.0) is None


def test_who_reaches_nobody_is_lost_though_only_it_complains() -> None:
    """What it sends arrives nowhere, and it is the only one that sees so: the others are well."""
    said = Suspicions()
    for peer in "bc":
        said.hear(peer, "a", 1.0)
    assert said.lost(1.0) == ("a", "b")
    said.drop("a")
    assert said.lost(9.0) is None


def test_two_that_are_gone_are_lost_and_not_those_who_say_so() -> None:
    """As many broken connections on both sides: the word of others counts."""
    said = Suspicions()
    for gone in "ab":
        for by in "cd":
            said.hear(gone, by, 1.0)
    assert said.lost(1.0) == ("b", "c")
    said.drop("b")
    assert said.lost(1.0) == ("a", "c")
    said.drop("a")
    assert said.lost(9.0) is None


def test_another_generation_starts_anew() -> None:
    """Complaints of an older layout are about connections that are made again."""
    said = Suspicions()
    said.hear("a", "b", 1.0)
    said.clear()
    assert said.lost(9.0) is None


def test_of_two_alike_the_newest_is_lost() -> None:
    """Workers are numbered, and w10 came after w9."""
    said = Suspicions()
    said.hear("w9", "w10", 1.0)
    said.hear("w10", "w9", 1.0)
    assert said.lost(1.0) == ("w10", "w9")


def test_who_is_spared_is_lost_only_with_more_broken_connections() -> None:
    """It has the state that the others lack, and only one of them has seen the connection break."""
    said = Suspicions()
    said.hear("w9", "w10", 1.0)
    assert said.lost(1.0) == ("w9", "w10")
    assert said.lost(1.0, {"w9"}) == ("w10", "w9")
    said.hear("w9", "w11", 1.0)
    assert said.lost(1.0, {"w9"}) == ("w9", "w10")
