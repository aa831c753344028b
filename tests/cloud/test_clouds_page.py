"""Every test that docs/clouds.md names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_that_show_a_figure_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs/clouds.md").read_text())
    assert len(named) > 20
    for path, test in named:
        text = (ROOT / path).read_text()
        assert not test or f"def {test}(" in text, f"{path} has no {test}"
