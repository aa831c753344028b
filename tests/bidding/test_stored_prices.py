"""Stored histories come back as they were, and a damaged file is refused."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bidding.errors import HistoryError
from bidding.markets import files
from bidding.markets.files import read_prices, stored_prices, write_prices
from bidding.markets.history import Series
from cloud.model import Pool

SHARED_FOLDER = [HealthCheck.function_scoped_fixture]
times = st.lists(st.integers(0, 10**9), min_size=1, max_size=40, unique=True).map(sorted)
name = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)
pools = st.builds(Pool, name, name, name, name)


def series(at_s, seed=0):
    value = np.random.default_rng(seed).uniform(0.01, 30.0, len(at_s))
    return Series(at_s=np.array(at_s, dtype=np.float64), value=value)


@settings(max_examples=50, suppress_health_check=SHARED_FOLDER)
@given(spans=st.dictionaries(pools, times, max_size=4))
def test_what_is_written_is_read(tmp_path, spans):
    """Any pools and any moments, to the bit, and the same bytes for the same history."""
    history = {pool: series(at_s, i) for i, (pool, at_s) in enumerate(spans.items())}
    path = tmp_path / "prices.npz"
    write_prices(path, history)
    written, again = path.read_bytes(), stored_prices(path)
    assert set(again) == set(history)
    for pool, kept in again.items():
        assert np.array_equal(kept.at_s, history[pool].at_s)
        assert np.array_equal(kept.value, history[pool].value)
    write_prices(path, again)
    assert path.read_bytes() == written


@settings(max_examples=300, suppress_health_check=SHARED_FOLDER)
@given(data=st.data())
def test_damage_is_refused_or_harmless(tmp_path, data):
    """Cut off anywhere, or with a byte changed, a file is refused by our own error or still reads."""
    path = tmp_path / "prices.npz"
    write_prices(path, {Pool("aws", "r", "ra", "kind"): series(range(20))})
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    changed = bytearray(good)
    changed[at] ^= data.draw(st.integers(1, 255))
    for bad in (good[:at], bytes(changed)):
        path.write_bytes(bad)
        try:
            stored_prices(path)
        except HistoryError as e:
            assert "\n" not in str(e)


def test_the_oldest_points_go_first(tmp_path, monkeypatch):
    """A series that is longer than the bound keeps its newest points."""
    monkeypatch.setattr(files, "POINTS_MAX", 5)
    pool = Pool("aws", "r", "ra", "kind")
    write_prices(tmp_path / "prices.npz", {pool: series(range(9))})
    assert stored_prices(tmp_path / "prices.npz")[pool].at_s.tolist() == [4.0, 5.0, 6.0, 7.0, 8.0]


def test_a_folder_may_hold_stored_prices_and_text_side_by_side(tmp_path):
    """Prices stored earlier and a fresh dump are read as one history."""
    pool = Pool("aws", "r", "ra", "kind")
    write_prices(tmp_path / "old.npz", {pool: series([0, 10])})
    (tmp_path / "new.csv").write_text("at,cloud,region,zone,type,usd_per_h\n20,aws,r,ra,kind,0.5\n")
    merged, _ = read_prices(tmp_path)
    assert merged[pool].at_s.tolist() == [0.0, 10.0, 20.0]
    (tmp_path / "bad.npz").write_bytes(b"PK and nothing else")
    with pytest.raises(HistoryError, match=r"bad\.npz: "):
        read_prices(tmp_path)


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    """The size that the archive states is looked at before anything is unpacked."""
    monkeypatch.setattr(files, "STORED_BYTES_MAX", 1000)
    write_prices(tmp_path / "prices.npz", {Pool("aws", "r", "ra", "kind"): series(range(200))})
    with pytest.raises(HistoryError, match="at most 1000 are read"):
        stored_prices(tmp_path / "prices.npz")
