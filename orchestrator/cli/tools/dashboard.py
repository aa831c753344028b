"""The tool `dashboard`: prints the address of the dashboard."""

from typing import Annotated

import typer
from rich.text import Text

from cloud.clock import DAY_S
from orchestrator.cli.command import Command, CommandError
from orchestrator.dashboard.keys import Role, address_with_key
from orchestrator.paths import Places


def dashboard(
    command: Command,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="A key that changes nothing, to give away.")
    ] = False,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the key lasts.")] = 30,
) -> None:
    """Print the address of the dashboard, with a new key in it.

    Only the hash of a key is kept, so each call makes a new one; earlier ones stay valid.
    """
    house = command.client().house()
    if not house.dashboard_url:
        raise CommandError("the dashboard is off; set dashboard.enabled = true, then down and up")
    role: Role = "read-only" if read_only else "admin"
    places = Places(command.config.state_dir)
    address = address_with_key(house, places, role, days * DAY_S)
    command.answer({"dashboard_url": address, "role": role}, Text(address, no_wrap=True))
