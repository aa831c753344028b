"""Profiles: what is written can be read, and what is wrong is refused in one line."""

import msgspec
import pytest
from blocks import make_profile

from agent.profile import Link, render
from orchestrator.planner import profiles
from orchestrator.planner.errors import ProfileError


def test_a_profile_survives_its_text(tmp_path):
    """Written and read again it is the same, one section a line."""
    profile = make_profile(5, seed=1)
    path = tmp_path / "profile.json"
    path.write_text(render(profile), encoding="utf-8")
    assert profiles.load(path) == profile
    assert sum("block" in line for line in path.read_text().splitlines()) == 5 + 1


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (lambda text: text[: len(text) // 2], "no usable profile"),
        (lambda _: "", "no usable profile"),
        (lambda _: "[1, 2]", "no usable profile"),
        (lambda text: text.replace('"version": 1', '"version": 0'), "written in format 0"),
        (lambda text: text.replace("[1,2,4]", "[4,2,1]"), "must be positive and rising"),
        (lambda text: text.replace("[1,2,4]", "[1,2]"), r"\[3\] times for 2 sizes"),
        (lambda text: text.replace("16000000000.0", "-1.0"), "memory_bytes is -1.0"),
        (lambda text: text.replace('"sections": [', '"sections": [], "x": ['), "no sections"),
    ],
)
def test_a_bad_profile_is_refused_in_one_line(tmp_path, change, answer):
    """Torn, old, empty or contradictory: one line names the file, the reason and what to do."""
    path = tmp_path / "p.json"
    path.write_text(change(render(make_profile(3))), encoding="utf-8")
    with pytest.raises(ProfileError, match=answer) as refusal:
        profiles.load(path)
    text = str(refusal.value)
    assert "\n" not in text
    assert str(path) in text
    assert "write it again with: orchestrator tools profile" in text


def test_a_missing_profile_says_how_to_write_one(tmp_path):
    """No file, or no text: one line."""
    with pytest.raises(
        ProfileError, match="no such profile; write one with: orchestrator tools profile"
    ):
        profiles.load(tmp_path / "none.json")
    (tmp_path / "blob").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="cannot be read"):
        profiles.load(tmp_path / "blob")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_cost_is_a_number(value):
    """A latency below nothing, or none at all, is no latency."""
    with pytest.raises(ValueError, match="latency_s"):
        Link(bandwidth_bytes_per_s=1.0, latency_s=value)
    with pytest.raises(ValueError, match="backward_s"):
        section = make_profile(1).sections[0]
        msgspec.structs.replace(section, backward_s=(value,) * 3)
