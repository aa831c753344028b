"""An hour of the past, in a real file of the history, and what the page shows when it has all of the present."""

from cloud.clock import DAY_S
from orchestrator.history import store
from orchestrator.paths import Places

T0 = 1_790_000_000.0
PAST_S = 3_600
LIVE = "document.querySelector('#link')?.textContent == 'live'"
READY = f"{LIVE} && document.querySelector('#jobs').innerText.includes('2,412')"


def write_past(places: Places) -> None:
    """An hour of two pools, one morph, one eviction and a pause of the training, and nothing else, in the file of the history."""
    begun_s = T0 - PAST_S
    series = {
        "held/local/local-a/local.small/spot": lambda s: 2 if s < 1800 else 1,
        "held/local/local-b/local.large/spot": lambda s: 1 if s > 600 else 0,
        "job/gpt-7f3a/loss": lambda s: 6.0 * 0.5 ** (s / 1200),
        "price/local/local-a/local.small": lambda s: 0.03 + s / 1e6,
        "usd_per_h": lambda s: 0.12 if s < 1800 else 0.09,
        "job/gpt-7f3a/step": lambda s: s - max(0, min(s, 2400) - 1800),
        "job/gpt-7f3a/depth": lambda _: 1,
        "job/gpt-7f3a/width": lambda s: 3 if s < 1800 else 2,
    }
    happened = [
        (601, "join", "", "m-88e0", "has joined", "it proved that it computes the same"),
        (1750, "notice", "", "m-73aa", "will be taken away in 120 s", "the provider announced it"),
        (1800, "eviction", "", "m-73aa", "is gone", "as announced 120 s before"),
        (
            1800,
            "layout",
            "gpt-7f3a",
            "gpt-7f3a",
            "morphs to 1x2 at step 1 800",
            "one worker of three is gone",
        ),
        (2400, "checkpoint", "gpt-7f3a", "gpt-7f3a", "note", "gpt-7f3a: checkpoint of step 1800"),
    ]
    spent = [("useful", 0.170), ("waiting", 0.041), ("redone", 0.012), ("manager", 0.0221)]
    file = store.writing(places.history)
    with store.turn(file):
        for table in ("series", "points", "events", "jobs", "spent", "machines", "charges"):
            file.execute(f"DELETE FROM {table}")
        for number, (name, value) in enumerate(series.items()):
            file.execute("INSERT INTO series VALUES (?, ?, ?, ?)", (number, name, begun_s, T0))
            for nth, tier in enumerate(store.TIERS):
                for s in range(0, PAST_S + 1, tier.bucket_s):
                    row = (number, nth, int(begun_s) + s, 1, *[float(value(s))] * 4)
                    file.execute("INSERT INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        for number, (s, kind, job, who, what, because) in enumerate(happened):
            row = (f"{number:04}", begun_s + s, kind, job, who, what, because)
            file.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        row = ("gpt-7f3a", "RUNNING", begun_s, None, b"{}")
        file.execute("INSERT INTO jobs VALUES (?, ?, ?, ?, ?)", row)
        for cause, usd in spent:
            row = (int(T0 // DAY_S), "gpt-7f3a", "", "", cause, usd, 1.0, 0.5)
            file.execute("INSERT INTO spent VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        machines = [
            ("default-2-1", "m-19c2", "local/local-a/local.small", begun_s, None, 0.128, 1.0),
            ("default-2-2", "m-88e0", "local/local-b/local.large", begun_s + 600, T0, 0.042, 0.8),
        ]
        for token, machine, pool, from_s, to_s, usd, hours in machines:
            row = (token, machine, "gpt-7f3a", pool, "spot", from_s, to_s, 0.096, "the cheapest")
            file.execute("INSERT INTO machines VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            row = (token, "gpt-7f3a", "useful", usd, hours)
            file.execute("INSERT INTO charges VALUES (?, ?, ?, ?, ?)", row)
    file.close()
