"""Backtests: the manager's decision over recorded markets, compared with other strategies."""
