"""What both examinations of an account have to keep to, and their lines by name."""

from collections.abc import Iterable, Mapping

from cloud.findings import Finding


def by_name(lines: Iterable[Finding], prefix: str) -> dict[str, Finding]:
    """Return lines by their names without the prefix; what is wrong has a remedy, in one line."""
    lines = list(lines)
    assert len({line.name for line in lines}) == len(lines)
    for line in lines:
        assert "\n" not in line.found + line.remedy
        assert bool(line.remedy) != line.ok, line
    return {line.name.removeprefix(prefix): line for line in lines}


def faults(lines: Mapping[str, Finding]) -> dict[str, str]:
    """Return what is wrong and what to do, by name."""
    return {x: f"{line.found}; {line.remedy}" for x, line in lines.items() if not line.ok}
