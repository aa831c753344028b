"""Strategies over recorded markets: engine, baselines, and the bound of foresight."""
