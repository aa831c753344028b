"""Histories stored as Parquet come back as they were, and what is damaged is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidding import history, parquet
from bidding.errors import HistoryError
from bidding.files import read_prices, write_prices
from bidding.history import Series
from cloud.model import Pool

times = st.lists(st.integers(0, 10**9), min_size=1, max_size=40, unique=True).map(sorted)
name = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)
pools = st.builds(Pool, name, name, name, name)


def series(at_s, seed=0):
    value = np.random.default_rng(seed).uniform(0.01, 30.0, len(at_s))
    return Series(at_s=np.array(at_s, dtype=np.float64), value=value)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(pools, times, max_size=4))
def test_what_is_written_is_read(spans):
    """Any pools and any moments, to the bit, and the same bytes for the same history."""
    history_ = {pool: series(at_s, i) for i, (pool, at_s) in enumerate(spans.items())}
    data = parquet.write(history_)
    again = parquet.read(data)
    assert set(again) == set(history_)
    for pool, kept in again.items():
        assert np.array_equal(kept.at_s, history_[pool].at_s)
        assert np.array_equal(kept.value, history_[pool].value)
    assert parquet.write(again) == data


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_is_refused_or_harmless(data):
    """Cut off anywhere, or with a byte changed, a file is refused by our own error or still reads."""
    good = parquet.write({Pool("aws", "r", "ra", "kind"): series(range(20))})
    at = data.draw(st.integers(0, len(good) - 1))
    changed = bytearray(good)
    changed[at] ^= data.draw(st.integers(1, 255))
    for bad in (good[:at], bytes(changed)):
        try:
            parquet.read(bad)
        except HistoryError as e:
            assert "\n" not in str(e)


def test_the_oldest_points_go_first(monkeypatch):
    """A series that is longer than the bound keeps its newest points."""
    monkeypatch.setattr(parquet, "POINTS_MAX", 5)
    pool = Pool("aws", "r", "ra", "kind")
    kept = parquet.read(parquet.write({pool: series(range(9))}))[pool]
    assert kept.at_s.tolist() == [4.0, 5.0, 6.0, 7.0, 8.0]


def test_a_folder_may_hold_parquet_and_text_side_by_side(tmp_path):
    """Prices stored earlier and a fresh dump are read as one history."""
    pool = Pool("aws", "r", "ra", "kind")
    write_prices(tmp_path / "old.parquet", {pool: series([0, 10])})
    (tmp_path / "new.csv").write_text("at,cloud,region,zone,type,usd_per_h\n20,aws,r,ra,kind,0.5\n")
    merged, _ = read_prices(tmp_path)
    assert merged[pool].at_s.tolist() == [0.0, 10.0, 20.0]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(HistoryError, match=r"bad\.parquet: "):
        read_prices(tmp_path)


def test_a_stored_history_is_small():
    """Five months of a pool's quotes take less than a third of their text."""
    at_s = np.arange(2000) * 6000.0
    one = Series(at_s=at_s, value=np.round(0.3 + 0.001 * np.sin(at_s), 4))
    data = parquet.write({Pool("aws", "us-east-1", "us-east-1a", "p3.2xlarge"): one})
    row = len("2020-01-01T00:00:00+00:00,aws,us-east-1,us-east-1a,p3.2xlarge,0.3\n")
    assert len(data) < 2000 * row / 3
    assert history.POINTS_MAX * 16 < parquet.PAGE_BYTES_MAX
