"""A whole deployment in virtual time: the simulated cloud, and what runs on its machines.

The manager's own loop drives it, so that the code which buys a thousand machines is the code that a
test takes through a month in seconds. Instances, workers and the keeper are modelled by what the
manager can see of them: when they join, commit, fall silent, and what of that gets lost on the way.
"""

from orchestrator.simulated.running import Report, play, simulate
from orchestrator.simulated.scenario import FAULTS, Scenario

__all__ = ["FAULTS", "Report", "Scenario", "play", "simulate"]
