"""`python -m agent.machine.join`: what the first-boot script of every machine starts.

It proves at the join door who this machine is, starts the node with what it gets there, and stays
as the machine's dead man: a process apart from the node and older than it. A node belongs to one
cluster, so when the manager's head was started again, the node ends, and the machine joins once
more with a new one. It ends when a node ends otherwise, or when there was no word from a manager for
too long; the first-boot script then ends the machine. Nothing of the node can hold it up, because it
waits for nothing but signals and time.
"""

import argparse
import secrets
import signal
import sys
import time
from typing import NoReturn

from agent.boot.node import DIFFERS
from agent.machine.join.dead_man import LastWord
from agent.machine.join.door import Door, NoAnswer, TurnedAway
from agent.machine.join.identity import PROOFS, NoIdentity, proof_of
from agent.machine.join.node import Node

AGAIN_S, AGAIN_S_MAX = 0.2, 5.0
LOOK_S = 0.2  # at whether the node is up
LEAVE_S = 3.0  # for the agent to say that the machine goes
END_S = 5.0  # for a node that was asked to end
WATCHED = {signal.SIGCHLD, signal.SIGTERM}
SILENT, ASKED = 75, 143


class Over(Exception):  # noqa: N818 - it names what happened
    """The machine has to end; the argument is the exit status."""


class Machine:
    """The machine on its way in, and as long as it is in."""

    def __init__(self, options: argparse.Namespace, door: Door) -> None:
        self._options = options
        self._door = door
        self._began_s = time.monotonic()
        self._word = LastWord(options.silent_after_s, self._began_s)
        self._claim = secrets.token_hex(32)
        self._id = ""
        self._said = ""
        # Which cluster the manager has, by the door's newest word; empty while it has none.
        self._cluster = ""

    def stay(self) -> NoReturn:
        """Be a node of whichever cluster the manager has; raise `Over` when the machine has to end."""
        while True:
            node = self.join()
            try:
                self.live(node)
            finally:
                node.kill()
            self._say("the manager has another cluster, so this machine joins once more")

    def join(self) -> Node:
        """Ask until the door lets this machine in; raise `Over` if nobody does in time."""
        pause_s = AGAIN_S
        while True:
            try:
                return self._knock()
            except (NoAnswer, NoIdentity, TurnedAway) as error:
                self._say(f"not in yet: {error}")
            self._rest(pause_s, "no door let this machine in")
            pause_s = min(2 * pause_s, AGAIN_S_MAX)

    def _knock(self) -> Node:
        options = self._options
        ticket = self._call("GET", "/nonce", None)
        application = {
            "cloud": options.cloud,
            "deployment": options.deployment,
            "ticket": ticket,
            "claim": self._claim,
            "proof": proof_of(options.cloud, str(ticket["nonce"])),
            "took_s": time.monotonic() - self._began_s,
        }
        answer = self._call("POST", "/join", application)
        environment = answer.get("environment")
        if not isinstance(environment, dict):
            raise NoAnswer("the door lets this machine in, and hands out nothing")
        self._id = str(answer["machine_id"])
        return Node(environment, self._id, self._door.own_address)

    def live(self, node: Node) -> None:
        """Run the node until the manager has another cluster.

        Raises `Over` if it ends otherwise, cannot be a node, is asked to end, or no manager says a word.
        """
        node.start()
        next_s, up, told = time.monotonic(), False, False
        self._cluster = node.cluster
        while True:
            now_s = time.monotonic()
            if self._word.left_s(now_s) <= 0:
                self._leave(node)
            wake_s = next_s if up else min(next_s, now_s + LOOK_S)
            wait_s = min(wake_s - now_s, self._word.left_s(now_s))
            seen = signal.sigtimedwait(WATCHED, max(0.0, wait_s))
            if (status := node.status()) is not None:
                if self._newest_cluster() == node.cluster:
                    if status == DIFFERS:
                        self._ask("unlike", node.refusal())
                    raise Over(status & 0xFF)
                return
            if seen is not None and seen.si_signo == signal.SIGTERM:
                self._end(node)
            came_up = not up and node.is_up()
            up = up or came_up
            if came_up or time.monotonic() >= next_s:
                heard = self._ask("node" if up and not told else "")
                told = told or (up and heard)
                next_s = time.monotonic() + self._word.every_s
            if self._cluster not in ("", node.cluster):
                return

    def _newest_cluster(self) -> str:
        """Return which cluster there is, after waiting for a word that says it.

        A node ends a moment after its head, when the next one may not be up yet.
        """
        self._cluster, pause_s = "", AGAIN_S
        while not (self._ask("") and self._cluster):
            self._rest(pause_s, "no door said which cluster there is")
            pause_s = min(2 * pause_s, AGAIN_S_MAX)
        return self._cluster

    def _rest(self, pause_s: float, in_vain: str) -> None:
        """Wait before asking again; raise `Over` if no time is left, or the machine has to end."""
        left_s = self._word.left_s(time.monotonic())
        if left_s <= 0:
            self._say(f"{in_vain} for {self._options.silent_after_s:g} s")
            raise Over(SILENT)
        if signal.sigtimedwait({signal.SIGTERM}, min(pause_s, left_s)) is not None:
            raise Over(ASKED)

    def _ask(self, phase: str, why: str = "") -> bool:
        """Ask for a word, and say what phase of the boot is over; return whether it was heard."""
        sign = {
            "machine_id": self._id,
            "claim": self._claim,
            "phase": phase,
            "took_s": time.monotonic() - self._began_s,
            "why": why,
        }
        try:
            word = self._call("POST", "/word", sign)
            silent_s = float(str(word.get("silent_s")))
        except (NoAnswer, TurnedAway, ValueError) as error:
            self._say(f"no word: {error}")
            return False
        self._said, self._cluster = "", str(word.get("cluster", ""))
        self._word.hear(silent_s, time.monotonic())
        return True

    def _call(self, method: str, path: str, body: object) -> dict[str, object]:
        answer = self._door.call(method, path, body, self._word.patience_s(time.monotonic()))
        if not isinstance(answer, dict):
            raise NoAnswer(f"{method} {path}: the answer is no object")
        return answer

    def _leave(self, node: Node) -> None:
        """Let the agent say that this machine goes, as after a notice; then end all of it."""
        self._say(
            f"no word from a manager for {self._options.silent_after_s:g} s: this machine ends"
        )
        node.sign.touch()
        time.sleep(LEAVE_S)
        raise Over(SILENT)

    def _end(self, node: Node) -> None:
        node.ask_to_end()
        end_s = time.monotonic() + END_S
        while node.status() is None and (left_s := end_s - time.monotonic()) > 0:
            signal.sigtimedwait({signal.SIGCHLD}, left_s)
        raise Over(ASKED)

    def _say(self, line: str) -> None:
        """Print a line to the machine's console, once as long as it stays the same."""
        if line != self._said:
            self._said = line
            print(f"join: {line}", file=sys.stderr, flush=True)  # noqa: T201


def main() -> int:
    import os

    parser = argparse.ArgumentParser(prog="python -m agent.machine.join", description=__doc__)
    parser.add_argument("--door", required=True, metavar="HOST:PORT")
    parser.add_argument("--fingerprint", required=True, help="SHA-256 of the door's certificate")
    parser.add_argument("--deployment", required=True)
    parser.add_argument("--cloud", required=True, choices=sorted(PROOFS))
    parser.add_argument("--silent-after-s", required=True, type=float)
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    door = Door(options.door, options.fingerprint, os.environ.get("SPOT_ADDRESS", ""))
    try:
        Machine(options, door).stay()
    except Over as over:
        return int(over.args[0])


if __name__ == "__main__":
    sys.exit(main())
