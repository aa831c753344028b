"""The books of the local cloud on disk: what was sold, to whom, and what it has cost.

One file, replaced as a whole, written before a launch is answered. So a cloud that was killed still
knows its bill and the tokens that are spent, and says of the machines that went with it that they ended.
The market goes on from where it was, unless it is another one by now or has been away for too long.
"""

from pathlib import Path

import msgspec

from cloud import private
from cloud.errors import LedgerError
from cloud.simulated import Books

MARKET_AWAY_S_MAX = 90 * 86_400.0


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds. `market` says which market the prices came from."""

    market: str
    start_s: float
    books: Books


class Ledger:
    """The file at `path`, of a cloud whose prices come from `market`."""

    def __init__(self, path: Path, market: str) -> None:
        self.path = path
        self.market = market

    def read(self) -> Page | None:
        """What was written last; nothing in a new directory."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Page)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise LedgerError(
                f"{self.path} is not a ledger of the local cloud ({error}); "
                "move it away to start with empty books"
            ) from error

    def write(self, start_s: float, books: Books) -> None:
        """All of it or nothing. Raises OSError; the page before it is kept then."""
        page = Page(market=self.market, start_s=start_s, books=books)
        private.write(self.path, msgspec.json.encode(page))


def start_of_market(page: Page | None, market: str, tempo: float, now_s: float) -> float:
    """When the market began: where the ledger says, or now."""
    if page is None or page.market != market or page.start_s > now_s:
        return now_s
    if (now_s - page.start_s) * max(1.0, tempo) > MARKET_AWAY_S_MAX:
        return now_s
    return page.start_s
