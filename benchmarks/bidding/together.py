"""How often do zones and types of one region lose their capacity together? From the recorded probes."""

import itertools

import numpy as np
from _bidding import data, show

from bidding.compiled import Floats
from bidding.markets.files import read_probes
from bidding.markets.history import Series

WINDOW_S = 600.0
LOSSES_MIN = 5
MOMENTS = 4000


def losses(series: Series) -> Floats:
    """The moments at which the last capacity went."""
    went = np.diff((series.value > 0).astype(np.int64)) < 0
    return np.asarray(series.at_s[1:][went])


def joined(moments: Floats, other: Series) -> float:
    """Of the moments just before which the other had capacity: the share with a loss of the other close by."""
    gone = losses(other)
    had = [t for t in moments if other.at(t - WINDOW_S) > 0]
    return float(np.mean([bool(np.any(np.abs(gone - t) <= WINDOW_S)) for t in had])) if had else 0.0


def main() -> None:
    probes = read_probes(data() / "availability/spot-traces/availability")
    rng = np.random.default_rng(0)
    pairs = []
    for a, b in itertools.permutations(probes, 2):
        (folder_a, _, one), (folder_b, _, two) = a.rpartition("/"), b.rpartition("/")
        region = [name.split("_")[0][:-1] for name in (one, two)]
        if folder_a != folder_b or region[0] != region[1]:
            continue
        end_s = min(float(probes[a].at_s[-1]), float(probes[b].at_s[-1]))
        moments = losses(probes[a])
        if min(len(losses(probes[a])), len(losses(probes[b]))) < LOSSES_MIN:
            continue
        chance = joined(rng.uniform(0, end_s, MOMENTS), probes[b])
        pairs.append((one, two, joined(moments[moments < end_s], probes[b]), chance))
    rows = [[f"{one} -> {two}", f"{hit:.2f}", f"{chance:.2f}"] for one, two, hit, chance in pairs]
    hits, chances = (np.array([p[i] for p in pairs]) for i in (2, 3))
    show(
        f"Share of the losses of one that another joins within {WINDOW_S / 60:g} min, and of any moments.\n"
        f"Median {np.median(hits):.2f}, over chance {np.median(hits - chances):.2f}, of {len(pairs)} pairs.",
        ["pair", "joined", "by chance"],
        rows,
    )


if __name__ == "__main__":
    main()
