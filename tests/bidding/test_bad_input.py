"""What is wrong in what we are given is refused in one line, or survived in a way that is stated."""

import sys
from pathlib import Path

import numpy as np
import pytest

from bidding.backtests.backtest import Work
from bidding.errors import BiddingError, ConstraintError
from bidding.markets.files import read_markets
from bidding.markets.grid import Listing
from bidding.markets.grid import build as on_grid
from bidding.markets.history import Series, build, read_aws
from bidding.markets.observations import PoolRecord, Times
from cloud.model import InstanceType, Pool
from orchestrator.backtest.measure import Choices, measure

KIND = InstanceType(name="kind", cloud="aws", slots=1, memory_bytes=1, on_demand_usd_per_h=1.0)
TYPES = "type,slots,speed,on_demand_usd_per_h\nkind,1,1.0,1.0\n"
HEAD = "at,cloud,region,zone,type,usd_per_h\n"


def backtest(data: str, strategy: str, starts: int, report: Path, choices: Choices) -> int:
    """As the command does: the summary, or one line on stderr."""
    try:
        _, summary = measure(data, strategy, starts, report, choices)
    except (BiddingError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(summary)
    return 0


FILES = {
    "nothing at all": ("", "holds no prices"),
    "a header alone": (HEAD, "holds no prices"),
    "one point": (HEAD + "0,aws,r,ra,kind,0.3\n", "give a longer history"),
    "milliseconds": (HEAD + "1600000000000,aws,r,ra,kind,0.3\n", "1 rows were no prices"),
    "a quote that never ends": (
        HEAD + '0,aws,r,ra,kind,"0.3\n' + "9,aws,r,ra,kind,0.3\n" * 9000,
        "prices.csv: after line",
    ),
    "absurd prices alone": (
        HEAD + "0,aws,r,ra,kind,0\n9,aws,r,ra,kind,-1\n99,aws,r,ra,kind,1e9\n",
        "holds no prices",
    ),
    "a few minutes": (
        HEAD + "0,aws,r,ra,kind,0.3\n900,aws,r,ra,kind,0.4\n",
        "hold no start",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_history_that_holds_too_little_is_refused_in_one_line(name, tmp_path, capsys):
    """Empty files, one point, absurd prices alone and too short a span each say what to give instead."""
    text, says = FILES[name]
    (tmp_path / "types.csv").write_text(TYPES)
    (tmp_path / "prices.csv").write_text(text)
    choices = Choices(hours=2.0)
    assert backtest(str(tmp_path), "all", 5, tmp_path / "r.html", choices) == 2
    line = capsys.readouterr().err
    assert says in line
    assert line.count("\n") == 1


LONG = "".join(f"{3600 * i},aws,us-east-1,us-east-1a,kind,0.{3 + i % 2}\n" for i in range(400))


def test_a_table_with_a_mark_before_its_head_is_read_and_what_is_left_out_is_said(tmp_path, capsys):
    """As spreadsheets write it; rows that are no prices, folders with a file's name and a row of the year 5138 cost nothing."""
    (tmp_path / "types.csv").write_text(TYPES)
    (tmp_path / "odd.csv").mkdir()
    late = "99999999999,aws,us-east-1,us-east-1a,kind,0.3\n"
    (tmp_path / "p.csv").write_text(f"\ufeff{HEAD}{LONG}{late}x,aws,r,ra,kind,0.3\n")
    assert backtest(str(tmp_path), "ours", 2, tmp_path / "r.html", Choices(hours=2.0)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "of 402 rows 2 were no prices and left out" in said


@pytest.mark.parametrize("counts", [[1] * 900, [0] * 900, [1, 0] + [0] * 900])
def test_capacity_that_never_changes_is_a_market_too(counts, tmp_path):
    """Always there, never there, or gone before anything can be foretold: a table comes, without a calibration."""
    prices = tmp_path / "prices" / "aws" / "us-east-1"
    probes = tmp_path / "availability" / "1-node" / "availability"
    prices.mkdir(parents=True)
    probes.mkdir(parents=True)
    (prices / "p.csv").write_text(HEAD + LONG.replace("kind", "p3.2xlarge"))
    said = f'{{"metadata":{{"gap_seconds":1800}},"data":{counts}}}'
    (probes / "us-east-1a_v100_1.json").write_text(said)
    assert backtest(str(tmp_path), "ours", 2, tmp_path / "r.html", Choices(hours=2.0)) == 0
    assert "Evictions within the hour" not in (tmp_path / "r.html").read_text()


def test_a_broken_probe_is_named(tmp_path, capsys):
    """Which file it is that holds no capacity is in the line."""
    (tmp_path / "types.csv").write_text(TYPES)
    for folder, name, text in (
        ("prices/aws/r", "p.csv", HEAD + LONG),
        ("availability", "a.json", "{}"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).write_text(text)
    assert backtest(str(tmp_path), "ours", 2, tmp_path / "r.html", Choices(hours=2.0)) == 2
    assert "availability/a.json: not an availability probe" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_said_in_one_line(tmp_path, capsys):
    """A folder in its place, or a file where its folder should be."""
    (tmp_path / "file").write_text("")
    for report in (tmp_path, tmp_path / "file" / "r.html"):
        assert backtest("synthetic", "ours", 2, report, Choices(hours=2.0)) == 2
        line = capsys.readouterr().err
        assert f"--report {report}: " in line
        assert line.count("\n") == 1


KINDS = {
    "speed of nothing": ("kind,1,0,1.0", "the speed must be above 0"),
    "speed that is no number": ("kind,1,nan,1.0", "the speed must be above 0"),
    "price below zero": ("kind,1,1.0,-1.0", "the price above 0"),
    "price that is no number": ("kind,1,1.0,nan", "the price above 0"),
    "absurd price": ("kind,1,1.0,1e9", "below $1,000/h"),
    "no slot": ("kind,0,1.0,1.0", "must all be positive"),
    "half a row": ("kind,1", "is not type,slots,speed"),
    "machines that are larger than the job": ("kind,4,1.0,1.0", "give --slots 4 or more"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_type_that_cannot_be_is_refused_in_one_line(name, tmp_path, capsys):
    """Speeds and prices of zero, below zero or no number, and machines too large, say what is wrong and where."""
    row, says = KINDS[name]
    (tmp_path / "types.csv").write_text(f"{TYPES.splitlines()[0]}\n{row}\n")
    points = "".join(f"{3600 * i},aws,r,ra,kind,0.3\n" for i in range(100))
    (tmp_path / "prices.csv").write_text(HEAD + points)
    assert backtest(str(tmp_path), "ours", 5, tmp_path / "r.html", Choices(hours=2.0)) == 2
    line = capsys.readouterr().err
    assert says in line
    assert line.count("\n") == 1


def test_an_empty_answer_of_the_cloud_is_an_empty_history():
    """No text and no rows give no series, and nothing fails."""
    assert read_aws("")[0] == {}
    assert read_aws('{"SpotPriceHistory": []}')[0] == {}
    assert build([])[0] == {}


def test_absurd_prices_among_good_ones_are_counted_and_left_out(tmp_path):
    """Zero, below zero and a billion are dropped; the good rows make the series."""
    rows = "0,aws,r,ra,kind,0.3\n10,aws,r,ra,kind,0\n20,aws,r,ra,kind,-1\n30,aws,r,ra,kind,1e9\n"
    (tmp_path / "types.csv").write_text(TYPES)
    (tmp_path / "prices.csv").write_text(HEAD + rows + "40,aws,r,ra,kind,0.4\n")
    markets, repairs = read_markets(tmp_path)
    (listing,) = next(iter(markets.values()))
    assert listing.price.value.tolist() == [0.3, 0.4]
    assert repairs.absurd == 3


def test_one_price_is_enough_for_a_market_that_says_how_long():
    """A series of one point holds for the whole span that is asked for."""
    one = Series(at_s=np.array([0.0]), value=np.array([0.3]))
    listing = Listing(pool=Pool("aws", "r", "ra", "kind"), type=KIND, price=one)
    market = on_grid([listing], start_s=0.0, end_s=86_400.0)
    assert market.price.min() == market.price.max() == 0.3


def test_a_clock_that_jumps_back_makes_no_negative_time():
    """Hours held, hours refused and times taken never shrink, whatever the clock says."""
    record = PoolRecord().sold(5000.0).left(1000.0)
    assert record.held_h == 0.0
    assert PoolRecord().refused(5000.0).sold(1000.0).refused_h == 0.0
    assert PoolRecord().sold(5000.0).hazard_per_h(1000.0) > 0.0
    assert Times().saw("start_s", -3.0) == Times()
    record = PoolRecord().sold(5000.0).left(4000.0)
    assert record.left(9000.0) == record


def test_a_file_that_is_no_text_is_named(tmp_path, capsys):
    """Bytes that are no text, as prices or as types, give one line with the file in it."""
    for name in ("prices.csv", "types.csv"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_bytes(b"\xff\xfe\x00junk")
        assert backtest(str(folder), "all", 5, tmp_path / "r.html", Choices(hours=2.0)) == 2
        line = capsys.readouterr().err
        assert str(folder / name) in line
        assert line.count("\n") == 1


def test_a_job_of_no_number_of_hours_is_refused():
    """Not a number and without end are no length of a job."""
    for hours in (float("nan"), float("inf"), 0.0):
        with pytest.raises(ConstraintError, match="hours > 0"):
            Work(hours=hours)
