"""Reading what markets did: repairs are made, counted and never silent."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidding.errors import HistoryError
from bidding.markets.files import read_prices, read_probes
from bidding.markets.history import (
    Point,
    Series,
    build,
    merge,
    read_aws,
    read_azure_daily,
    read_azure_retail,
    read_csv,
    read_probe,
)
from cloud.model import Pool

POOL = Pool("aws", "us-x-1", "us-x-1a", "big")


ITEM = {
    "armRegionName": "westeurope",
    "armSkuName": "NC6",
    "skuName": "NC6 Spot",
    "retailPrice": 0.1,
    "effectiveStartDate": "2024-05-01T00:00:00Z",
}


def aws_row(at, price):
    return {
        "AvailabilityZone": "us-x-1a",
        "InstanceType": "big",
        "SpotPrice": price,
        "Timestamp": at,
        "ProductDescription": "Linux/UNIX",
    }


def test_aws_dumps_are_put_in_order_and_absurd_rows_are_counted():
    """Newest-first rows, a repeat, a zero, a billion and a broken row give a clean series."""
    rows = [
        aws_row("2020-01-02T00:00:00.000Z", "2.0"),
        aws_row("2020-01-01T00:00:00.000Z", "1.0"),
        aws_row("2020-01-01T00:00:00.000Z", "1.0"),
        aws_row("2020-01-03T00:00:00.000Z", "0"),
        aws_row("2020-01-03T00:00:00.000Z", "1e9"),
        aws_row("2020-01-03T00:00:00.000Z", "-1"),
        aws_row("2020-01-03T00:00:00.000Z", "nan"),
        {"AvailabilityZone": "us-x-1a"},
    ]
    history, repairs = read_aws(json.dumps({"SpotPriceHistory": rows}))
    assert history[POOL].value.tolist() == [1.0, 2.0]
    assert (repairs.rows, repairs.duplicate, repairs.absurd, repairs.unreadable) == (8, 1, 4, 1)
    assert repairs.unsorted == 1


def test_only_the_prices_of_linux_count():
    """Dumps without a filter hold every system, at the same moments in the same zones."""
    at = "2020-01-01T00:00:00.000Z"
    rows = [
        {**aws_row(at, price), "ProductDescription": system}
        for system, price in (
            ("Windows", "0.9"),
            ("Linux/UNIX (Amazon VPC)", "0.3"),
            ("Red Hat Enterprise Linux", "0.5"),
        )
    ]
    history, repairs = read_aws(json.dumps({"SpotPriceHistory": rows}))
    assert history[POOL].value.tolist() == [0.3]
    assert (repairs.rows, repairs.other, repairs.unreadable) == (3, 2, 0)


def test_a_local_zone_is_of_the_region_it_is_named_after():
    """What says in which regions a job may run holds for local zones as well."""
    row = {**aws_row("2020-01-01T00:00:00Z", "1"), "AvailabilityZone": "us-west-2-lax-1a"}
    (pool,) = read_aws(json.dumps({"SpotPriceHistory": [row]}))[0]
    assert (pool.region, pool.zone) == ("us-west-2", "us-west-2-lax-1a")


def test_azure_meters_in_other_moneys_and_of_windows_are_left_out():
    """One machine has several spot meters; a page that holds no objects is counted, and fails nobody."""
    item = {
        **ITEM,
        "currencyCode": "USD",
        "unitOfMeasure": "1 Hour",
        "productName": "Virtual Machines NC Series",
    }
    others = (
        {"productName": "Virtual Machines NC Series Windows", "retailPrice": 0.3},
        {"currencyCode": "INR", "retailPrice": 8.3},
        {"unitOfMeasure": "1 Month", "retailPrice": 73.0},
    )
    items = [item, *({**item, **other} for other in others), 7]
    history, repairs = read_azure_retail(json.dumps({"Items": items}))
    assert history[Pool("azure", "westeurope", "westeurope", "NC6")].value.tolist() == [0.1]
    assert (repairs.rows, repairs.other, repairs.unreadable) == (5, 3, 1)


def test_a_folder_may_hold_pages_of_azure_and_tables_with_columns_in_any_order(tmp_path):
    """What is not recognised would be left out without a word."""
    (tmp_path / "page.json").write_text(json.dumps({"BillingCurrency": "USD", "Items": [ITEM]}))
    (tmp_path / "own.csv").write_text(
        '"cloud",region,zone,type,at,usd_per_h\naws,us-x-1,us-x-1a,big,0,1\n'
    )
    history, repairs = read_prices(tmp_path)
    assert list(history) == [POOL, Pool("azure", "westeurope", "westeurope", "NC6")]
    assert repairs.rows == 2


def test_what_is_not_a_dump_is_refused():
    """Text that is no JSON is refused with the reason."""
    with pytest.raises(HistoryError, match="describe-spot-price-history"):
        read_aws("<html>")


def test_azure_prices_from_both_sources():
    """The retail API's spot meters and the daily table give pools of the region."""
    history, _ = read_azure_retail(json.dumps({"Items": [ITEM, {**ITEM, "skuName": "NC6"}]}))
    assert history[Pool("azure", "westeurope", "westeurope", "NC6")].value.tolist() == [0.1]
    daily, repairs = read_azure_daily("Date,NC6,NC12\n2/24/2020,$0.12,\n2/25/2020,$0.13,\n", "east")
    assert list(daily) == [Pool("azure", "east", "east", "NC6")]
    assert daily[Pool("azure", "east", "east", "NC6")].value.tolist() == [0.12, 0.13]
    assert repairs.unreadable == 0


def test_csv_with_seconds_or_dates():
    """Both ways of writing a moment are read."""
    text = "at,cloud,region,zone,type,usd_per_h\n0,aws,us-x-1,us-x-1a,big,1\n1970-01-01T00:01:00,aws,us-x-1,us-x-1a,big,2\n"
    series = read_csv(text)[0][POOL]
    assert series.at_s.tolist() == [0.0, 60.0]


def test_probes_hold_counts_and_say_their_gap():
    """A probe keeps only the ticks at which the count changes; a broken one is refused."""
    series = read_probe('{"metadata": {"gap_seconds": 30}, "data": [0, 0, 3, 3, 1]}')
    assert series.at_s.tolist() == [0, 60, 120]
    assert series.value.tolist() == [0, 3, 1]
    with pytest.raises(HistoryError):
        read_probe('{"metadata": {}, "data": [1]}')
    with pytest.raises(HistoryError):
        read_probe('{"metadata": {"gap_seconds": 30}, "data": []}')


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0.01, 10)), min_size=1, max_size=40))
def test_a_series_is_a_step_function_of_its_rows(rows):
    """Whatever the order of the rows, the value at a moment is that of the latest row before it."""
    series = build(Point(POOL, float(t), v) for t, v in rows)[0][POOL]
    latest = dict(rows)
    for moment in range(51):
        before = [t for t in latest if t <= moment] or [min(latest)]
        assert series.at(moment) == latest[max(before)]


def test_the_mean_is_weighted_by_time():
    """One hour at 1 and three at 5 have a mean of 4."""
    series = Series(at_s=np.array([0.0, 3600.0]), value=np.array([1.0, 5.0]))
    assert series.mean(0, 4 * 3600) == pytest.approx(4.0)
    assert series.mean(-3600, 0) == pytest.approx(1.0)


def test_a_series_of_nothing_or_without_order_is_refused():
    """Empty and unordered series say what to do instead."""
    with pytest.raises(HistoryError, match="at least one"):
        Series(at_s=np.array([]), value=np.array([]))
    with pytest.raises(HistoryError, match="increase"):
        Series(at_s=np.array([1.0, 1.0]), value=np.array([1.0, 2.0]))


def test_overlapping_dumps_are_one_history():
    """Rows that several dumps share count once."""
    one = build([Point(POOL, 0.0, 1.0), Point(POOL, 1.0, 2.0)])[0]
    two = build([Point(POOL, 1.0, 2.0), Point(POOL, 2.0, 3.0)])[0]
    assert merge([one, two])[POOL].value.tolist() == [1.0, 2.0, 3.0]


def test_a_missing_folder_is_one_clear_line(tmp_path):
    """The error names the folder and what is wanted."""
    with pytest.raises(HistoryError, match="not a folder"):
        read_prices(tmp_path / "none")


def test_the_real_dumps_are_read_whole(data):
    """Every row of three regions is read, shared rows count once, and none is absurd."""
    history, repairs = read_prices(data / "prices" / "aws-2020")
    assert (repairs.absurd, repairs.unreadable) == (0, 0)
    assert repairs.duplicate > 0
    assert len({p.region for p in history}) == 3


def test_the_real_probes_start_where_their_notes_say(data):
    """The 1-node files of us-west-2 hold 1 most of the time: the reading is not inverted."""
    probes = read_probes(data / "availability" / "spot-traces")
    west = [s for name, s in probes.items() if "02-15-2023/us-west-2" in name]
    assert len(west) == 3
    assert all(s.mean(0, float(s.at_s[-1])) > 0.8 for s in west)
