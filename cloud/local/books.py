"""The books of the local cloud on disk: what was sold, to whom, and what it has cost.

The books are one file, replaced as a whole and written before a launch is answered. So after a kill
the cloud still knows its bill and the spent tokens, and reports that its machines have ended. The
market continues where it was, unless a different market is asked for or too much time has passed.
"""

from pathlib import Path

import msgspec

from cloud import private
from cloud.errors import LedgerError
from cloud.simulated import Books

MARKET_AWAY_S_MAX = 90 * 86_400.0


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file. `market` names the market that the prices came from."""

    market: str
    start_s: float
    books: Books


class Ledger:
    """The file at `path`, of a cloud whose prices come from `market`."""

    def __init__(self, path: Path, market: str) -> None:
        self.path = path
        self.market = market

    def read(self) -> Page | None:
        """Return the page that was written last; `None` in a new directory."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Page)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise LedgerError(
                f"{self.path} is not a ledger of the local cloud ({error}); "
                "move it away to start with empty books"
            ) from error

    def write(self, start_s: float, books: Books) -> None:
        """Write the whole page. If that fails, raise OSError and keep the page before it."""
        page = Page(market=self.market, start_s=start_s, books=books)
        private.write(self.path, msgspec.json.encode(page))


def start_of_market(page: Page | None, market: str, tempo: float, now_s: float) -> float:
    """Return when the market began: the time in the ledger if it still applies, else now."""
    if page is None or page.market != market or page.start_s > now_s:
        return now_s
    if (now_s - page.start_s) * max(1.0, tempo) > MARKET_AWAY_S_MAX:
        return now_s
    return page.start_s
