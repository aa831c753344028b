"""The edge of the bidder: reads histories from files and folders. Everything else here is pure."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from bidding.errors import HistoryError
from bidding.history import (
    History,
    Repairs,
    Series,
    merge,
    read_aws,
    read_azure_daily,
    read_csv,
    read_probe,
)
from bidding.study import Sold, daily_lows
from cloud.model import Pool

FILES_MAX = 10_000


def read_prices(folder: Path) -> tuple[dict[Pool, Series], Repairs]:
    """Every `.json` (describe-spot-price-history) and `.csv` below a folder as one history."""
    histories: list[History] = []
    repairs = Repairs()
    for path in _files(folder):
        text = path.read_text(encoding="utf-8")
        try:
            history, repaired = _read(path, text)
        except HistoryError as e:
            raise HistoryError(f"{path}: {e}") from e
        histories.append(history)
        repairs = repairs + repaired
    merged = merge(histories)
    rows = sum(len(s.at_s) for h in histories for s in h.values())
    kept = sum(len(s.at_s) for s in merged.values())
    return merged, repairs + Repairs(duplicate=rows - kept)


def _files(folder: Path) -> Iterable[Path]:
    if not folder.is_dir():
        raise HistoryError(f"{folder} is not a folder: give the folder that holds the price files")
    files = sorted(p for p in folder.rglob("*") if p.suffix in {".json", ".csv"})
    if len(files) > FILES_MAX:
        raise HistoryError(f"{folder} holds {len(files)} files; more than {FILES_MAX} are not read")
    return files


def _read(path: Path, text: str) -> tuple[dict[Pool, Series], Repairs]:
    if path.suffix == ".json":
        return read_aws(text)
    header = text.lstrip("\ufeff").partition("\n")[0]
    if header.startswith("Date,"):
        return read_azure_daily(text, path.stem)
    if header.startswith("at,"):
        return read_csv(text)
    return {}, Repairs()


def read_probes(folder: Path) -> dict[str, Series]:
    """Every capacity probe below a folder, by its path without the suffix."""
    return {
        str(p.relative_to(folder).with_suffix("")): read_probe(p.read_text(encoding="utf-8"))
        for p in _files(folder)
        if p.suffix == ".json"
    }


AWS_ACCELERATORS = {
    "p2.xlarge": ("k80", 1),
    "p2.8xlarge": ("k80", 8),
    "p2.16xlarge": ("k80", 16),
    "p3.2xlarge": ("v100", 1),
    "p3.8xlarge": ("v100", 4),
    "p3.16xlarge": ("v100", 8),
}


def read_sold(aws_region: Path, azure: Path) -> list[Sold]:
    """The market of the pricing study: one AWS region, and the daily tables of Azure."""
    aws, _ = read_prices(aws_region)
    sold = [
        Sold(cloud="aws", zone=pool.zone, accelerator=AWS_ACCELERATORS[pool.type][0],
             accelerators=AWS_ACCELERATORS[pool.type][1], low_usd_per_h=daily_lows(series))
        for pool, series in aws.items()
    ]  # fmt: skip
    kinds: dict[str, tuple[str, int]] = {}
    for line in (azure / "instance_mapping.csv").read_text(encoding="utf-8").splitlines()[1:]:
        name, kind, number = line.split(",")
        kinds[name] = (kind.lower(), int(number))
    days, _ = read_prices(azure)
    for pool, series in days.items():
        accelerator, count = kinds[pool.type]
        sold.append(Sold(cloud="azure", zone=pool.zone, accelerator=accelerator,
                         accelerators=count, low_usd_per_h=daily_lows(series)))  # fmt: skip
    return sold


def read_throughputs(path: Path) -> dict[str, dict[str, float]]:
    """Steps per second alone, by model and accelerator."""
    raw = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, dict[str, object]]])
    alone: dict[str, dict[str, float]] = {}
    for accelerator, models in raw.items():
        for model, rows in models.items():
            alone.setdefault(model, {})[accelerator] = float(str(rows["null"]))
    return alone
