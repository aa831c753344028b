"""A whole deployment in virtual time: the simulated cloud, and what runs on its machines.

The manager's own loop drives it, so the code that buys a thousand machines is the code that a test
takes through a month in seconds. Instances, workers and the keeper are modelled by what the manager
can see of them: when they join, commit and fall silent, and which reports of that are lost.
"""

from orchestrator.simulated.runs import Report, play, simulate
from orchestrator.simulated.scenario import FAULTS, Scenario

__all__ = ["FAULTS", "Report", "Scenario", "play", "simulate"]
