"""The tool `dashboard`: prints the address of the dashboard."""

from rich.text import Text

from orchestrator.cli.command import Command, CommandError
from orchestrator.client import dashboard_address
from orchestrator.paths import Places


def dashboard(command: Command) -> None:
    """Print the address of the dashboard, with the key in it."""
    house = command.client().house()
    if not house.dashboard_url:
        raise CommandError("the dashboard is off; set dashboard.enabled = true, then down and up")
    address = dashboard_address(house, Places(command.config.state_dir))
    command.answer({"dashboard_url": address}, Text(address, no_wrap=True))
