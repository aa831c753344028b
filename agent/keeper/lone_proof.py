"""A job of one worker proves its script in a second process beside it. No torch here.

A joining worker proves that the script keeps no state outside of its session. If no worker joins,
a violation would show only with the first loss of a worker, perhaps after a night. So a job's only
worker is asked for a second process of itself as soon as there is a step to prove. That process is
a *prover*: it proves that step as a newcomer does, gets no layout, is not reported to the manager,
and is dismissed after its answer. If its result differs, the job fails.

A prover that ends without an answer is started once more. After that, or if there is no memory for
one, a line in the job's log says that the script was not tried, and the job trains on.

The job that owns the trial holds its lock.
"""

import time
from collections.abc import Callable

from agent.keeper import proofs
from agent.keeper.admission import Entrance, pose
from agent.keeper.member import Member
from agent.keeper.roster import Roster
from agent.keeper.storage.vault import Vault
from agent.protocol import Failed, Message, ProofWanted, Proved, Ready, Untried

TRIES = 2
# From the request to the answer: the script loads its data, and its process gets a processor last.
PATIENCE_S = 1800.0
UNTRIED = (
    "{}: the script was not tried in a second process, because {}: what it keeps outside of its session shows only when "
    "a worker joins"
)
LATE = f"it gave no answer for {PATIENCE_S / 60:.0f} minutes"


class Trial:
    def __init__(
        self,
        roster: Roster,
        vault: Vault,
        entrance: Entrance,
        fail: Callable[[Member, Failed], None],
        say: Callable[[str], None],
    ) -> None:
        self._roster, self._vault, self._entrance = roster, vault, entrance
        self._fail, self._say = fail, say
        self.wanted = False  # whether this job has a trial
        self._asked: str | None = None  # the worker that was asked for a second process
        self._until_s, self._tries = 0.0, 0
        self._prover: Member | None = None
        self._why = ""  # the prover gave no answer
        self._found: Failed | None = None  # a failure, until there is a worker to report it for

    # --- who comes and goes -----------------------------------------------------------------------

    def join(self, prover: Member) -> None:
        """Take a prover that connects, also one that reconnects after a restart of the keeper."""
        if self._prover is not None:
            self._prover.close()
        self._prover = prover
        self._until_s = time.monotonic() + PATIENCE_S

    def leave(self, prover: Member) -> None:
        """Forget a prover whose connection is broken; the worker that started it says why."""
        if self._prover is prover:
            self._prover = None
        prover.close()

    def close(self, why: str | None = None) -> None:
        """Stop trying. If `why` is None, the keeper ends, and the next goes on with the prover."""
        prover, self._prover, self._asked = self._prover, None, None
        if prover is not None and why is not None:
            prover.dismiss(why)
        elif prover is not None:
            prover.close()

    # --- what is said -----------------------------------------------------------------------------

    def hear(self, prover: Member, message: Message) -> None:
        """Handle a prover's answer, and ignore its output, because the worker has printed that."""
        if self._prover is not prover:
            return
        match message:
            case Ready():
                prover.ready = message
                self.look()
            case Proved():
                self._on_proved(prover, message)
            case Failed(kind="refused"):
                self._ends(message)
            case Failed():
                self._why = f"it failed there: {message.detail.strip().rpartition(chr(10))[2]}"
                prover.dismiss("the script failed")
            case _:
                pass

    def _on_proved(self, prover: Member, proved: Proved) -> None:
        question = prover.question
        if question is None or question.version != proved.version:
            return
        why = proofs.judge(prover.worker, question, proved)
        step = question.script_step
        self._ends(Failed(kind="refused", detail=why, step=step) if why else None)

    def untried(self, worker: str, message: Untried) -> None:
        """Note that the worker has no second process; try again or give up."""
        if worker != self._asked or not self._trying:
            return
        if message.final or self._tries >= TRIES:
            self._gives_up(self._why or message.why)
        self._asked = None

    # --- looking ----------------------------------------------------------------------------------

    def look(self) -> None:
        """Ask for a prover, or pose the question to it, if there is a step to prove."""
        if self._found is not None:
            self._tell()
        if not self._trying:
            self.close("the script is tried")
            return
        if self._roster.finishing is not None:
            self.close("the job is done")
            return
        if self._asked not in self._roster.members:
            # If the worker is lost, so is its second process.
            self._asked = None
        prover, waits = self._prover, self._prover is not None or self._asked is not None
        if waits and time.monotonic() > self._until_s:
            self._gives_up(LATE)
        elif prover is not None:
            self._pose(prover)
        elif (host := self._alone()) is not None and not waits:
            self._ask(host)

    @property
    def _trying(self) -> bool:
        return self.wanted and not self._entrance.tried

    def _pose(self, prover: Member) -> None:
        if prover.ready is not None and prover.question is None:
            base = self._vault.asked(partly=False)
            if base is not None:
                pose(prover, base)

    def _alone(self) -> Member | None:
        """Return the only worker here, if it trains a whole model and there is a step to prove."""
        members = [*self._roster.members.values()]
        if len(members) != 1 or not self._roster.started or members != self._roster.inside():
            return None
        ready = members[0].ready
        whole = ready is not None and ready.unbuilt is None
        return members[0] if whole and self._vault.asked(partly=False) is not None else None

    def _ask(self, host: Member) -> None:
        self._asked, self._tries = host.worker, self._tries + 1
        self._until_s = time.monotonic() + PATIENCE_S
        host.post(ProofWanted())

    # --- the end ----------------------------------------------------------------------------------

    def _ends(self, found: Failed | None) -> None:
        self._entrance.tried, self._found = True, found
        self.close("the script was tried")
        self._tell()

    def _tell(self) -> None:
        """Report the failure for a worker that has done the step: the manager knows no provers."""
        found, member = self._found, next(iter(self._roster.members.values()), None)
        if found is not None and member is not None:
            self._found = None
            self._fail(member, found)

    def _gives_up(self, why: str) -> None:
        self._entrance.tried = True
        self._say(UNTRIED.format(self._asked or "the job", why))
        self.close("the script was not tried")
