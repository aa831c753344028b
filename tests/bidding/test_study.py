"""The pricing study's printed figures from its raw logs (Narayanan 2021, ch. 6)."""

import numpy as np
import pytest

from bidding.errors import HistoryError
from bidding.files import read_sold, read_throughputs
from bidding.study import STRATEGIES, Sold, best, egress_usd, mean_cost_usd, run

BARS = {
    "A3C": (1, 1.32, 1.71, 3.10, 3.53),
    "CycleGAN": (1, 1.00, 1.08, 1.54, 1.64),
    "LM (batch size 80)": (1, 1.00, 1.08, 1.70, 1.81),
    "Recommendation (batch size 8192)": (1, 1.01, 1.31, 2.38, 2.76),
    "ResNet-50 (batch size 128)": (1, 1.00, 1.08, 1.49, 1.53),
    "Transformer (batch size 256)": (1, 1.00, 1.11, 2.36, 3.21),
}
DURATIONS = (0.125, 0.25, 0.5, 1, 2, 4, 8)
GAINS = {
    "A3C": (1, 1, 1, 1.02, 1.05, 1.11, 1.16),
    "ResNet-50 (batch size 128)": (1, 1, 1, 1, 1.01, 1.02, 1.05),
    "Transformer (batch size 256)": (1, 1, 1.02, 1.07, 1.17, 1.28, 1.41),
}


@pytest.fixture(scope="session")
def logs(data):
    sold = read_sold(data / "prices/aws-2020/us-east-1", data / "prices/azure-2020")
    speeds = read_throughputs(data / "throughputs/pricing-study-26-models.json")
    one_v100 = [s for s in sold if (s.cloud, s.accelerator, s.accelerators) == ("aws", "v100", 1)]
    days = sorted({d for s in one_v100 for d in s.low_usd_per_h})
    return sold, speeds, days[-35:-5], days[-1]


@pytest.mark.parametrize("model", BARS)
def test_the_bars_of_the_study_come_out(logs, model):
    """Each added freedom cuts the cost of four V100-days by the printed factor, within 0.02."""
    sold, speeds, starts, last = logs
    costs = [mean_cost_usd(s, sold, speeds[model], 4, starts, last) for s in STRATEGIES]
    assert 95.2 <= costs[0] <= 95.55
    assert [costs[0] / c for c in costs] == pytest.approx(BARS[model], abs=0.02)


@pytest.mark.parametrize("model", GAINS)
def test_switching_pays_more_for_longer_jobs(logs, model):
    """The mean gain of re-choosing every day grows with the job as printed, within 0.02."""
    sold, speeds, starts, last = logs
    gains = [
        np.mean([run("+multi-cloud", sold, speeds[model], d, s, last).cost_usd
                 / run("+dynamic", sold, speeds[model], d, s, last).cost_usd for s in starts])
        for d in DURATIONS
    ]  # fmt: skip
    assert gains == pytest.approx(GAINS[model], abs=0.02)


@pytest.mark.parametrize(
    ("dataset_gb", "model_gb", "dataset_share", "model_share"),
    [(150, 0.098, 0.0913, 0.00006), (17, 0.408, 0.0098, 0.00025)],
)
def test_moving_bytes_costs_little(dataset_gb, model_gb, dataset_share, model_share):
    """Table 6.2: what moving a dataset once and a model once cost against 160 V100-hours."""
    compute_usd = 160 * 0.918
    assert egress_usd(dataset_gb) / compute_usd == pytest.approx(dataset_share, rel=0.005)
    one_move = egress_usd(model_gb * 10_000) / 10_000
    assert one_move / compute_usd == pytest.approx(model_share, abs=0.000005)


def test_a_day_without_any_quote_is_refused():
    """Asking for the best of nothing names the day and what to do."""
    sold = [Sold(cloud="aws", zone="a", accelerator="v100", accelerators=1, low_usd_per_h={1: 1.0})]
    with pytest.raises(HistoryError, match="day 7"):
        best(7, sold, {"v100": 1.0})
