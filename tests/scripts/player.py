"""Plays a script alone, and keeps what it has trained.

python player.py SCRIPT OUT

Left in OUT are the parameters in the order of its optimizers, and, with a session, all that is registered.
"""

import runpy
import sys

import torch

import agent.session


def registered() -> dict[str, object]:
    """What a session holds at the end: the state of its modules, and its plain values."""
    if not agent.session.made():
        return {}
    (session,) = agent.session.made()
    modules = {
        key: thing.state_dict()
        for key, thing in session.replica.objects.items()
        if isinstance(thing, torch.nn.Module)
    }
    return {**modules, "state": dict(session.state)}


def main() -> None:
    torch.set_num_threads(1)
    optimizers: list[torch.optim.Optimizer] = []
    add_param_group = torch.optim.Optimizer.add_param_group

    def noted(self, group):
        if self not in optimizers:
            optimizers.append(self)
        add_param_group(self, group)

    torch.optim.Optimizer.add_param_group = noted
    _, script, out = sys.argv
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    trained = [p.detach() for each in optimizers for g in each.param_groups for p in g["params"]]
    torch.save({"trained": trained, "registered": registered()}, out)


if __name__ == "__main__":
    main()
