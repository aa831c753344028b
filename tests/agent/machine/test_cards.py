"""What a machine finds of its accelerators, with a driver and without."""

from pathlib import Path

import pytest

from agent.boot.node import NEEDED, refusal
from agent.machine.join import cards
from agent.machine.join.node import TOKEN, Node

CARD, SOUND, OTHER = ("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x1234", "0x030000")


def bus(folder: Path, *devices: tuple[str, str]) -> Path:
    for number, (vendor, kind) in enumerate(devices):
        device = folder / "bus/pci/devices" / f"0000:00:{number:02x}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    (folder / "bus/pci/devices/half").mkdir(parents=True)
    return folder


def tool(folder: Path, *words: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text("#!/bin/sh\n" + "".join(f"echo '{word}'\n" for word in words))
    path.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_cards_on_the_bus_are_counted_without_a_driver(tmp_path: Path) -> None:
    """A card's sound, and a display of the machine's own, compute nothing."""
    assert cards.on_bus(bus(tmp_path, CARD, SOUND, OTHER, CARD)) == 2
    assert cards.on_bus(tmp_path / "none") == 0


def test_the_drivers_tool_is_asked_and_then_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", tool(tmp_path, "GPU 0: A10G", "  MIG 1g", "GPU 1: A10G"))
    assert cards.served(tmp_path) == 2
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert cards.served(tmp_path) == 0
    (tmp_path / "gpus" / "0000:00:1e.0").mkdir(parents=True)
    assert cards.served(tmp_path) == 1


@pytest.mark.parametrize(
    ("idle", "served", "slots", "refused"),
    [(0, 0, "1", False), (1, 0, "1", True), (4, 4, "4", False), (4, 3, "3", False)],
)
def test_a_machine_whose_cards_no_driver_serves_cannot_join(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    idle: int,
    served: int,
    slots: str,
    *,
    refused: bool,
) -> None:
    """It would train on its processor at the price of its card."""
    monkeypatch.delenv("SPOT_SLOTS", raising=False)
    monkeypatch.setenv("SPOT_TEMP_DIR", str(tmp_path))
    monkeypatch.setattr(cards, "on_bus", lambda: idle)
    monkeypatch.setattr(cards, "served", lambda: served)
    cluster = "id/session/Ray 2 on Python 3"
    monkeypatch.setattr("agent.boot.node.versions", lambda: "Ray 2 on Python 3")
    handed_out = {"SPOT_CLUSTER": cluster, "SPOT_HEAD": "127.0.0.1:1", TOKEN: "secret"}
    node = Node(handed_out, "i-1", "127.0.0.1")
    assert node._environment["SPOT_SLOTS"] == slots
    assert bool(node.refusal()) is refused
    assert (refusal(node._environment)[0] == 65) is refused


@pytest.mark.parametrize(("length", "refused"), [(42, False), (47, True)])
def test_a_folder_whose_sockets_would_have_too_long_names_is_refused(
    monkeypatch: pytest.MonkeyPatch, length: int, *, refused: bool
) -> None:
    """Ray would end without a word, and the machine with it."""
    monkeypatch.setattr("agent.boot.node.versions", lambda: "Ray 2 on Python 3")
    session = "session_2026-11-26_12-00-00_123456_12345"
    known = dict.fromkeys(NEEDED, "some") | {
        "SPOT_CLUSTER": f"id/{session}/Ray 2 on Python 3",
        "SPOT_TEMP_DIR": "/" + "x" * (length - 1),
    }
    status, said = refusal(known)
    assert (status == 64) is refused
    assert ("SPOT_TEMP_DIR" in said) is refused
