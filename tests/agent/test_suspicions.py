"""Of two that complain about each other only one is lost."""

from agent.suspicions import Suspicions


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


def test_another_generation_starts_anew() -> None:
    """Complaints of an older layout are about connections that are made again."""
    said = Suspicions()
    said.hear("a", "b", 1.0)
    said.clear()
    assert said.lost(9.0) is None
