"""Rarely needed commands, `orchestrator tools COMMAND`, each in the module of its name."""

NAMES = (
    "drill",
    "gc",
    "dashboard",
    "trace",
    "profile",
    "simulate",
    "backtest",
    "replay",
    "track",
    "spans",
)
