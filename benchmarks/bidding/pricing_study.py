"""Does the pricing study come out of its raw logs? Its bars, its gains by duration, its table 6.2."""

from _bidding import data, show
from _study import STRATEGIES, egress_usd, mean_cost_usd, read_sold, read_throughputs, run

PRINTED = {
    "A3C": (1, 1.32, 1.71, 3.10, 3.53),
    "CycleGAN": (1, 1.00, 1.08, 1.54, 1.64),
    "LM (batch size 80)": (1, 1.00, 1.08, 1.70, 1.81),
    "Recommendation (batch size 8192)": (1, 1.01, 1.31, 2.38, 2.76),
    "ResNet-50 (batch size 128)": (1, 1.00, 1.08, 1.49, 1.53),
    "Transformer (batch size 256)": (1, 1.00, 1.11, 2.36, 3.21),
}
GAINS = {
    "A3C": (1, 1, 1, 1.02, 1.05, 1.11, 1.16),
    "ResNet-50 (batch size 128)": (1, 1, 1, 1, 1.01, 1.02, 1.05),
    "Transformer (batch size 256)": (1, 1, 1.02, 1.07, 1.17, 1.28, 1.41),
}
DAYS = (0.125, 0.25, 0.5, 1, 2, 4, 8)


def main() -> None:
    folder = data()
    sold = read_sold(folder / "prices/aws-2020/us-east-1", folder / "prices/azure-2020")
    speeds = read_throughputs(folder / "throughputs/pricing-study-26-models.json")
    v100 = [s for s in sold if (s.cloud, s.accelerator, s.accelerators) == ("aws", "v100", 1)]
    days = sorted({d for s in v100 for d in s.low_usd_per_h})
    starts, last = days[-35:-5], days[-1]
    rows = []
    for model, printed in PRINTED.items():
        costs = [mean_cost_usd(s, sold, speeds[model], 4, starts, last) for s in STRATEGIES]
        rows.append(
            [
                model,
                f"${costs[0]:.2f}",
                *(f"{costs[0] / c:.2f} ({p:.2f})" for c, p in zip(costs, printed, strict=True)),
            ]
        )
    show(
        "Cost cut by each freedom, 4 V100-days, ours (printed)",
        ["model", "base", *STRATEGIES],
        rows,
    )
    rows = []
    for model, printed in GAINS.items():
        gains = []
        for d in DAYS:
            once = [run("+multi-cloud", sold, speeds[model], d, s, last).cost_usd for s in starts]
            often = [run("+dynamic", sold, speeds[model], d, s, last).cost_usd for s in starts]
            gains.append(sum(a / b for a, b in zip(once, often, strict=True)) / len(starts))
        rows.append([model, *(f"{g:.2f} ({p:.2f})" for g, p in zip(gains, printed, strict=True))])
    show("Gain of re-choosing, by V100-days, ours (printed)", ["model", *map(str, DAYS)], rows)
    compute_usd = 160 * 0.918
    rows = [
        [
            name,
            f"{egress_usd(gb) / compute_usd:.2%} ({a})",
            f"{egress_usd(model_gb * 1e4) / 1e4 / compute_usd:.3%} ({b})",
        ]
        for name, gb, model_gb, a, b in (
            ("ResNet-50", 150, 0.098, "9.13%", "0.006%"),
            ("BERT-Base", 17, 0.408, "0.98%", "0.025%"),
        )
    ]
    show(
        "Table 6.2: moving, of the compute cost, ours (printed)",
        ["job", "data once", "model once"],
        rows,
    )


if __name__ == "__main__":
    main()
