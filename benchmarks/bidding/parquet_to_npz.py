"""Convert a Parquet table of prices into a file that the backtest reads. It needs pyarrow.

parquet_to_npz.py IN.parquet OUT.npz     columns: cloud, region, zone, type, at_s, value
"""

import sys
from pathlib import Path

from bidding.markets.files import write_prices
from bidding.markets.history import Point, build
from cloud.model import Pool

COLUMNS = ["cloud", "region", "zone", "type", "at_s", "value"]


def main() -> None:
    if len(sys.argv) != 3:
        print(__doc__)
        return
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(sys.argv[1], columns=COLUMNS).to_pydict()
    rows = zip(*(table[name] for name in COLUMNS), strict=True)
    history, repairs = build(Point(Pool(*names), at_s, value) for *names, at_s, value in rows)
    write_prices(Path(sys.argv[2]), history)
    print(f"{sum(len(s.at_s) for s in history.values())} prices of {len(history)} pools; {repairs}")


if __name__ == "__main__":
    main()
