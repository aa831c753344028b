"""What a house was started with is in force until it ends, also for its next manager."""

import pytest

from orchestrator.config import frozen, in_force, load, read
from orchestrator.supervisor.supervisor import House

SETTINGS = """
[manager]
deployment = "mine"
redis_url = "redis://127.0.0.1:6379/0"
[budget]
total_usd = 0.00001
[job]
depth = 2
nan = "skip"
[local]
prices = "prices é \\"1\\".json"
[storage]
checkpoint_url = "file:///mnt/a b"
"""


@pytest.mark.parametrize("text", ["", SETTINGS])
def test_frozen_settings_give_the_same_ones(tmp_path, text):
    file, kept = tmp_path / "orchestrator.toml", tmp_path / "kept.toml"
    file.write_text(text)
    config = load(file, {})
    kept.write_text(frozen(config, file))
    again = load(kept, {})
    assert in_force(again) == in_force(config)
    assert again.job == config.job


def test_an_address_with_a_password_is_not_written_down(tmp_path):
    """It came from the environment, which every manager has."""
    env = {
        "ORCHESTRATOR__MANAGER__REDIS_URL": "redis://me:hidden@here:1/0",
        "ORCHESTRATOR__HOOKS__URL": "https://hooks.example.com/hidden",
        "ORCHESTRATOR__AWS__ENDPOINT_URL": "http://me:hidden@127.0.0.1:4566",
    }
    config = load(None, env)
    assert "hidden" not in frozen(config, None)
    (tmp_path / "kept.toml").write_text(frozen(config, None))
    assert in_force(load(tmp_path / "kept.toml", env)) == in_force(config)


def test_the_next_manager_does_not_read_what_a_person_edits(tmp_path):
    """A mistake in the file kept it from starting; another deployment made it disown its machines.

    Nor what becomes of the file in which the house shows its settings.
    """
    file = tmp_path / "orchestrator.toml"
    file.write_text("[manager]\ndeployment = 'mine'\n")
    house = House(load(file, {}), file)
    house.places.make()
    house._environment()
    house._choose_addresses()
    file.write_text("[manager]\ndeployment = 'another\n")
    house.places.settings.write_text("")
    order = house._head_order().actors
    assert read(house.places.settings, order.settings, {}).manager.deployment == "mine"
    house.places.remove_links()
