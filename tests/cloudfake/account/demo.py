"""`python -m cloudfake.account.demo aws|azure`: the demo, through the SDK of a cloud.

The cloud is a fake account with real machines. At the end our bill stands beside the books of the
account, and nothing of ours is left in it.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from cloudfake.account.running import DISK_USD_PER_H, Cloud, Running, running
from rich.console import Console
from rich.table import Table

from orchestrator.cli.command import Screen
from orchestrator.cli.demo import DemoFailed, Drill, Stage, play
from orchestrator.client import Client
from orchestrator.view import View

DEPLOYMENT = "demo"
END_S_MAX = 180.0  # a machine that was in no list is waited for as long as lists may lag
CENT = 0.01
CORRECTED_S = 20.0  # before the deadline our bill is shown, whatever it is


class AccountStage(Stage):
    """A fake account, in the folder of the demo."""

    def __init__(self, cloud: Cloud, **small: Any) -> None:
        super().__init__(**small)
        self._cloud = cloud
        self._account: Running | None = None

    @property
    def account(self) -> Running:
        assert self._account is not None
        return self._account

    @contextlib.contextmanager
    def open(self, folder: Path) -> Iterator[None]:
        words = ("--owner", DEPLOYMENT)
        with running(self._cloud, folder / "account", *words) as self._account:
            self.environment = self.account.environment()
            yield

    def settings(self) -> str:
        disk = f"[buying]\ndisk_usd_per_h = {DISK_USD_PER_H[self._cloud]:.6f}\n"
        patience = "[limits]\nlaunch_grace_s = 15\n"  # its lists do not lag
        return f"[local]\nenabled = false\n\n{disk}\n{patience}\n{self.account.settings()}"

    def take(self, client: Client, drill: Drill) -> list[str]:
        return self.account.drill(DEPLOYMENT, drill.nodes, drill.warning_s)

    def last_view(self, client: Client) -> View:
        """Return a view in which every machine has been given back, so that its bill is whole.

        Later lists correct the bill, so it is waited for until it is that of the books, or in vain.
        """
        deadline_s, held = time.monotonic() + END_S_MAX, "nothing is known of them"
        while time.monotonic() < deadline_s:
            view = client.view()
            if view is not None:
                kept = [x for x in view.machines if x.ended_at_s is None]
                late = time.monotonic() + CORRECTED_S > deadline_s
                if not kept and (late or self._agree(view, self.account.books())):
                    return view
                held = ", ".join(f"{x.id} is {x.state}" for x in kept)
            time.sleep(0.2)
        raise DemoFailed(f"not every machine was given back within {END_S_MAX:.0f} s: {held}")

    def settled(self, view: View, console: Console) -> bool:
        """Compare our bill with the account's books, and look for what was left there."""
        deadline_s = time.monotonic() + END_S_MAX
        books = self.account.books()
        while books["left"] and time.monotonic() < deadline_s:
            time.sleep(0.2)
            books = self.account.books()
        table = Table(title=f"The books of {self._cloud}", title_justify="left", show_header=False)
        ours, theirs = view.cost.spent_usd, books["usd"]
        rows = {
            "our bill": f"${ours:.5f}",
            "the account's": f"${theirs:.5f}",
            "machines bought": f"{len(view.machines)} by ours, {books['machines']} by the account's",
            "bought twice": ", ".join(books["bought_twice"]) or "nothing",
            "of others, ended": ", ".join(books["touched"]) or "nothing",
            "left": ", ".join(books["left"]) or "nothing: no machine, disk, interface or address",
        }
        for row in rows.items():
            table.add_row(*row)
        console.print(table)
        clean = not (books["left"] or books["bought_twice"] or books["touched"])
        return clean and self._agree(view, books)

    @staticmethod
    def _agree(view: View, books: dict[str, Any]) -> bool:
        return bool(abs(view.cost.spent_usd - books["usd"]) < CENT / 2)


def main() -> int:
    cloud = cast(Cloud, sys.argv[1])
    return play(Screen(), Path.cwd(), AccountStage(cloud))


if __name__ == "__main__":
    sys.exit(main())
