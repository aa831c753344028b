"""Plays scripts alone, each in a process of its own that has torch imported already.

python player.py < lines of JSON: {"script", "argv", "folder", "out"} > lines with the exit status

What the script has trained is left in OUT: the parameters in the order of its optimizers, and, with a session, all
that is registered.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

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


def play(script: str, argv: list[str], folder: str, out: str) -> None:
    optimizers: list[torch.optim.Optimizer] = []
    add_param_group = torch.optim.Optimizer.add_param_group

    def noted(self, group):
        if self not in optimizers:
            optimizers.append(self)
        add_param_group(self, group)

    torch.optim.Optimizer.add_param_group = noted
    os.chdir(folder)
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")
    trained = [p.detach() for each in optimizers for g in each.param_groups for p in g["params"]]
    torch.save({"trained": trained, "registered": registered()}, out)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            order, code = json.loads(line), 1
            with Path(order["folder"], "log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                try:
                    play(**order)
                    code = 0
                except SystemExit as ended:
                    code = int(ended.code or 0)
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
