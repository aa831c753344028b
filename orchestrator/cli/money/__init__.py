"""The commands about money and the past: what was spent on what, compared, exported, foreseen."""
