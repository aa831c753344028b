"""The backtest as a person runs it: a table, a page, or one line that says what is wrong."""

from xml.etree import ElementTree

import pytest

from bidding.errors import BiddingError
from bidding.markets.files import read_markets
from orchestrator.backtest.measure import Choices, measure
from orchestrator.backtest.plots import NOTHING, PlotLine, lines, stacked

SHORT = Choices(hours=2.0)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of a few starts on the synthetic markets."""
    path = tmp_path_factory.mktemp("report") / "backtest.html"
    measure("synthetic", "all", 4, path, SHORT)
    return path.read_text()


def test_the_report_draws_all_that_was_asked_for(page):
    """Both markets are there, with costs, prices and holdings, the frontier and the calibration."""
    for words in (
        "auctions as in 2016",
        "capacity as today",
        "Cost of one job",
        "prices and holdings",
        "Cost against the deadline",
        "predicted and observed",
        "clairvoyant bound",
    ):
        assert words in page
    assert page.count("<svg") >= 8
    assert "<script" not in page
    assert "nan" not in page


def test_every_plot_is_sound_svg(page):
    """Each drawing parses, and every point lies within its frame."""
    for part in page.split("<svg")[1:]:
        root = ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")
        for circle in root.iter("circle"):
            assert 0 <= float(circle.get("cx")) <= 860
            assert 0 <= float(circle.get("cy")) <= 300


def test_a_line_breaks_where_there_is_no_number():
    """Steps hold their last value up to the gap, begin anew after it, and nothing that is no number is drawn."""
    gap = [1.0, float("nan"), float("nan"), 2.0, 3.0]
    drawn = lines(
        [PlotLine(name="price", x=[0, 1, 2, 3, 4], y=gap, steps=True)], "hours", "dollars"
    )
    (path,) = ElementTree.fromstring(drawn.split("</svg>")[0] + "</svg>").iter("path")
    assert path.get("d").count("M") == 2
    assert "nan" not in drawn
    nothing = lines([PlotLine(name="price", x=[0, 1], y=[float("nan")] * 2)], "hours", "dollars")
    assert "nan" not in nothing


def test_holdings_are_drawn_on_top_of_each_other():
    """What is held together is as high as both, what is not held is not drawn, and nothing held is said."""
    held = [
        PlotLine(name="a", x=[0, 1, 2], y=[2.0, 2.0, 0.0]),
        PlotLine(name="b", x=[0, 1, 2], y=[0.0, 2.0, 2.0]),
    ]
    drawn = stacked(held, "hours", "slots", until=3.0)
    a, b = ElementTree.fromstring(drawn.split("</svg>")[0] + "</svg>").iter("path")
    assert a.get("d").count("M") == 1  # one band of two hours
    assert b.get("d").count("M") == 2  # above a, then on the ground
    upper, lower = (part.split("V")[1].split("H")[0] for part in b.get("d").split("M")[1:])
    assert float(upper) < float(lower)
    assert a.get("fill") != b.get("fill")
    assert stacked([], "hours", "slots", until=3.0) == NOTHING


MISTAKES = [
    ("/no/such", "all", 5, SHORT, "no such folder"),
    ("synthetic", "guess", 5, SHORT, "--strategy 'guess' is not one of"),
    ("synthetic", "all", 0, SHORT, "--starts must be 1"),
    ("synthetic", "all", 5, Choices(hours=2.0, market="moon"), "no market of synthetic"),
    ("synthetic", "all", 5, Choices(hours=-2.0), "hours=-2"),
    ("synthetic", "all", 5, Choices(hours=9000.0), "hold no start"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=[m[-1] for m in MISTAKES])
def test_mistakes_are_one_line(mistake, tmp_path):
    """Every mistake is one line that says what to do; no page is written."""
    data, strategy, starts, choices, says = mistake
    with pytest.raises(BiddingError, match=says) as refusal:
        measure(data, strategy, starts, tmp_path / "r.html", choices)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "r.html").exists()


def test_a_folder_without_prices_or_with_unknown_types_says_so(tmp_path):
    """An empty folder, and prices of a type that nothing is known of, are refused by name."""

    def refused(says: str) -> None:
        with pytest.raises(BiddingError, match=says):
            measure(str(tmp_path), "all", 5, tmp_path / "r.html", SHORT)

    refused("holds no prices")
    (tmp_path / "p.csv").write_text(
        "at,cloud,region,zone,type,usd_per_h\n0,aws,r,ra,odd,0.3\n9000000,aws,r,ra,odd,0.4\n"
    )
    refused("type odd; add a types.csv")
    (tmp_path / "types.csv").write_text("type,slots,speed,on_demand_usd_per_h\nodd,1,1.0,0.9\n")
    markets, _ = read_markets(tmp_path)
    assert [e.type.on_demand_usd_per_h for e in next(iter(markets.values()))] == [0.9]
    (tmp_path / "types.csv").write_text("type,slots,speed,on_demand_usd_per_h\nodd,one,1.0,0.9\n")
    refused("types.csv:2")


def test_the_real_markets_are_found(data):
    """Regions with prices alone and with the capacity of their zones are read from the folder."""
    markets, repairs = read_markets(data)
    assert "us-east-1, prices" in markets
    assert any("16-node" in name for name in markets)
    assert repairs.duplicate > 0
