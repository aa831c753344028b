"""The bidder's file access: histories from files and folders. All other modules are pure."""

import csv
import io
import math
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from bidding.errors import HistoryError
from bidding.markets.grid import Listing, paired
from bidding.markets.history import (
    POINTS_MAX,
    USD_PER_H_MAX,
    History,
    Repairs,
    Series,
    merge,
    read_aws,
    read_azure_daily,
    read_azure_retail,
    read_csv,
    read_probe,
)
from cloud.model import InstanceType, Pool

FILES_MAX = 10_000
SUFFIXES = (".json", ".csv", ".npz")
POOLS_MAX = 10_000
STORED_BYTES_MAX = 1 << 30
COLUMNS_KEPT = ("pools", "points", "at_s", "value")
HEADER_MAX = 10_000
COLUMNS = frozenset(("at", "cloud", "region", "zone", "type", "usd_per_h"))


def read_prices(folder: Path) -> tuple[dict[Pool, Series], Repairs]:
    """Read every price file below a folder as one history.

    Price files are `.json` (describe-spot-price-history, Azure retail prices), `.csv` and `.npz`.
    """
    histories: list[History] = []
    repairs = Repairs()
    for path in _files(folder):
        try:
            history, repaired = _read(path)
        except HistoryError as e:
            raise HistoryError(f"{path}: {e}") from e
        except OSError as e:
            raise HistoryError(f"{path}: {e.strerror}: make it readable, or take it away") from e
        histories.append(history)
        repairs = repairs + repaired
    merged = merge(histories)
    rows = sum(len(s.at_s) for h in histories for s in h.values())
    kept = sum(len(s.at_s) for s in merged.values())
    return merged, repairs + Repairs(duplicate=rows - kept)


def _files(folder: Path) -> Iterable[Path]:
    if not folder.is_dir():
        raise HistoryError(f"{folder} is not a folder: give the folder that holds the price files")
    files = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if len(files) > FILES_MAX:
        raise HistoryError(f"{folder} holds {len(files)} files; more than {FILES_MAX} are not read")
    return files


def stored_prices(path: Path) -> History:
    """Read the one file that `write_prices` has stored."""
    data = io.BytesIO(path.read_bytes())
    try:
        with zipfile.ZipFile(data) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        with np.load(data, allow_pickle=False) as kept:
            columns = {} if size > STORED_BYTES_MAX else {name: kept[name] for name in COLUMNS_KEPT}
    except Exception as e:  # zipfile and numpy raise anything at damaged bytes
        why = " ".join(str(e).split())
        raise HistoryError(f"not prices that were stored here, or a damaged file: {why}") from e
    if not columns:
        raise HistoryError(
            f"it unpacks to {size} bytes; at most {STORED_BYTES_MAX} are read: store fewer prices"
        )
    return _unpacked(columns)


def _unpacked(columns: Mapping[str, "np.ndarray"]) -> History:
    """Split the columns into one series per pool; `points` holds the length of each."""
    try:
        names = columns["pools"].tobytes()
        pools = msgspec.json.decode(names, type=list[tuple[str, str, str, str]])
        points = columns["points"].astype(np.int64).tolist()
        at_s, value = (columns[name].astype(np.float64) for name in ("at_s", "value"))
    except (ValueError, TypeError) as e:
        raise HistoryError(f"its columns are not those of prices: {e}") from e
    if (
        len(points) != len(pools)
        or min(points, default=1) < 1
        or not sum(points) == len(at_s) == len(value)
    ):
        raise HistoryError("its columns are not of the same length: the file is damaged")
    ends = np.cumsum(points)[:-1]
    pieces = zip(pools, np.split(at_s, ends), np.split(value, ends), strict=True)
    return {Pool(*names): Series(at_s=at, value=of) for names, at, of in pieces} if pools else {}


def write_prices(path: Path, history: History) -> None:
    """Store a history as .npz, whole or not at all, bounded to first pools and newest points."""
    some = sorted(history.items())[:POOLS_MAX]
    names = [(p.cloud, p.region, p.zone, p.type) for p, _ in some]
    at_s = [series.at_s[-POINTS_MAX:] for _, series in some]
    beside = path.with_suffix(".part")
    with beside.open("wb") as file:
        np.savez_compressed(
            file,
            pools=np.frombuffer(msgspec.json.encode(names), dtype=np.uint8),
            points=np.array([len(at) for at in at_s], dtype=np.int64),
            at_s=np.concatenate([*at_s, np.empty(0)]),
            value=np.concatenate([*(s.value[-POINTS_MAX:] for _, s in some), np.empty(0)]),
        )
    beside.replace(path)


def _read(path: Path) -> tuple[dict[Pool, Series], Repairs]:
    if path.suffix == ".npz":
        return dict(stored_prices(path)), Repairs()
    text = _text(path)
    if path.suffix == ".json":
        azure = '"Items"' in text and '"SpotPriceHistory"' not in text
        return read_azure_retail(text) if azure else read_aws(text)
    header = text.lstrip("\ufeff").partition("\n")[0]
    columns = next(csv.reader([header[:HEADER_MAX]]), [])
    if columns[:1] == ["Date"]:
        return read_azure_daily(text, path.stem)
    if COLUMNS.issubset(columns):
        return read_csv(text)
    return {}, Repairs()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise HistoryError(
            f"byte {e.start} is no UTF-8 text: give tables as text, or take the file away"
        ) from e


def read_probes(folder: Path) -> dict[str, Series]:
    """Read every capacity probe below a folder, keyed by its path without the suffix."""
    probes = {}
    for path in _files(folder):
        if path.suffix == ".json":
            try:
                probes[str(path.relative_to(folder).with_suffix(""))] = read_probe(_text(path))
            except HistoryError as e:
                raise HistoryError(f"{path}: {e}") from e
    return probes


AWS_ACCELERATORS = {
    "p2.xlarge": ("k80", 1),
    "p2.8xlarge": ("k80", 8),
    "p2.16xlarge": ("k80", 16),
    "p3.2xlarge": ("v100", 1),
    "p3.8xlarge": ("v100", 4),
    "p3.16xlarge": ("v100", 8),
}


# On-demand prices of AWS in 2020, per hour; a K80 does 0.15 of the work of a V100 (ResNet-18).
AWS_ON_DEMAND = {
    "p2.xlarge": 0.90,
    "p2.8xlarge": 7.20,
    "p2.16xlarge": 14.40,
    "p3.2xlarge": 3.06,
    "p3.8xlarge": 12.24,
    "p3.16xlarge": 24.48,
}
SPEEDS = {"k80": 0.15, "v100": 1.0}
TYPES_FILE = "types.csv"


def read_types(folder: Path) -> dict[str, InstanceType]:
    """Return the known machine types and those of `types.csv`.

    Its columns are type,slots,speed,on_demand_usd_per_h.
    """
    types = {
        name: InstanceType(
            name=name,
            cloud="aws",
            slots=AWS_ACCELERATORS[name][1],
            memory_bytes=0,
            on_demand_usd_per_h=usd,
            speed=SPEEDS[AWS_ACCELERATORS[name][0]],
            accelerator=AWS_ACCELERATORS[name][0],
        )
        for name, usd in AWS_ON_DEMAND.items()
    }
    return {**types, **listed_types(folder)}


def listed_types(folder: Path) -> dict[str, InstanceType]:
    """Return the types of `types.csv` alone."""
    path = folder / TYPES_FILE
    types: dict[str, InstanceType] = {}
    if not path.is_file():
        return types
    try:
        lines = _text(path).splitlines()
    except HistoryError as e:
        raise HistoryError(f"{path}: {e}") from e
    for number, line in enumerate(lines[1:], 2):
        try:
            kind = _listed(line)
        except ValueError as e:
            raise HistoryError(
                f"{path}:{number}: {line!r} is not type,slots,speed,on_demand_usd_per_h: {e}"
            ) from e
        types[kind.name] = kind
    return types


def _listed(line: str) -> InstanceType:
    """Return the type of a row; a speed or price that is not a finite number is refused."""
    name, slots, speed, usd = line.split(",")
    if not (0 < float(speed) < math.inf and 0 < float(usd) < USD_PER_H_MAX):
        raise ValueError(
            f"the speed must be above 0, the price above 0 and below ${USD_PER_H_MAX:,.0f}/h"
        )
    return InstanceType(
        name=name,
        cloud="",
        slots=int(slots),
        memory_bytes=0,
        on_demand_usd_per_h=float(usd),
        speed=float(speed),
    )


def read_markets(data: Path) -> tuple[dict[str, list[Listing]], Repairs]:
    """Return every market that a folder holds, by name.

    A folder with `prices/` and `availability/` is read as regions, each with prices alone and, if
    its zones have capacity probes, with those as well; any other folder is one market.
    """
    types = read_types(data)
    root = data / "prices"
    folders = sorted(p for p in root.glob("*/*") if p.is_dir()) if root.is_dir() else [data]
    markets: dict[str, list[Listing]] = {}
    repairs, everything = Repairs(), {}
    for folder in folders:
        prices, repaired = read_prices(folder)
        repairs = repairs + repaired
        everything.update(prices)
        listings = [
            Listing(pool=p, type=_type(types, p, folder), price=s) for p, s in prices.items()
        ]
        if listings:
            markets[f"{folder.name}, prices"] = listings
    for nodes, capacities in _probed(data / "availability").items():
        both = paired(everything, capacities, types)
        for region in sorted({entry.pool.region for entry in both}):
            few = [entry for entry in both if entry.pool.region == region]
            markets[f"{region}, prices + {nodes} capacity"] = few
        if len({entry.pool.region for entry in both}) > 1:
            markets[f"all regions, prices + {nodes} capacity"] = both
    if not markets:
        bad = repairs.absurd + repairs.unreadable
        said = [f"{bad} rows were no prices"] if bad else []
        said += [f"{repairs.other} were not of Linux in dollars per hour"] if repairs.other else []
        rows = f" ({', '.join(said)})" if said else ""
        raise HistoryError(
            f"{data} holds no prices{rows}: give a folder with .json, .csv or .npz price files"
        )
    return markets, repairs


def _type(types: dict[str, InstanceType], pool: Pool, folder: Path) -> InstanceType:
    if pool.type not in types:
        raise HistoryError(
            f"{folder}: nothing is known of the type {pool.type}; add a {TYPES_FILE} beside the prices "
            "with the columns type,slots,speed,on_demand_usd_per_h"
        )
    return types[pool.type]


PROBED_TYPES = {"v100_1": "p3.2xlarge", "k80_1": "p2.xlarge", "k80_8": "p2.8xlarge"}


def _probed(folder: Path) -> dict[str, dict[str, Series]]:
    """Return capacity probes by size (`16-node`), then by `zone/type`.

    The longest series of a zone counts.
    """
    found: dict[str, dict[str, Series]] = {}
    if not folder.is_dir():
        return found
    for name, series in read_probes(folder).items():
        parts = name.split("/")
        zone, _, kind = parts[-1].partition("_")
        if kind not in PROBED_TYPES or "availability" not in parts:
            continue
        key = f"{zone}/{PROBED_TYPES[kind]}"
        of_size = found.setdefault(parts[-3], {})
        if key not in of_size or series.at_s[-1] > of_size[key].at_s[-1]:
            of_size[key] = series
    return found
