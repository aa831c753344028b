"""What agents tell reaches the manager's inbox, whatever happens to the keeper in between."""

import time

import pytest
from crews import SECRET, Crew, until

from agent.machine.actor import Telling
from agent.messages import AgentJoined, NoticeSeen, WorkerLost
from cloud.clock import CLOCK
from cloud.model import Notice

pytestmark = pytest.mark.processes

WAITS_FOR_A_NOTICE = """
import time
import torch
from orchestrator import Session
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=1)
def loss_of(x):
    while session.notice_s is None:
        time.sleep(0.01)
    return model(x).sum()
for step in session.steps(2):
    session.backward(loss_of, [torch.ones(2, 4)])
    optimizer.step()
print("noticed", 60 < session.notice_s < 120)
"""


WAITS_UNTIL_IT_STAYS = """
import time
import torch
from agent.worker import group
from orchestrator import Session
model = torch.nn.Linear(4, 1)
session = Session(model, microbatches=1)
def loss_of(x):
    while session.notice_s is None:
        time.sleep(0.01)
    before, group.STAYS_S = group.STAYS_S, -1000.0  # as if that were long ago
    assert session.notice_s is None
    group.STAYS_S = before
    return model(x).sum()
for step in session.steps(1):
    session.backward(loss_of, [torch.ones(2, 4)])
"""


def joined(machine_id: str) -> AgentJoined:
    return AgentJoined(at_s=time.time(), machine_id=machine_id, address="127.0.0.1", slots=1)


def test_a_report_is_told_until_it_was_heard(mortal: Crew) -> None:
    """While the keeper is away reports wait; then they come, in order, and nothing is left waiting."""
    telling = Telling("m1", mortal.keeper.address, SECRET)
    telling.tell(joined("m1"))
    until("the first report", lambda: mortal.of(AgentJoined))
    until("the answer", lambda: telling.waiting() == 0)
    mortal.keeper.kill()
    lost = WorkerLost(at_s=time.time(), job="job", worker="w1", cause="exited")
    telling.tell(lost)
    telling.tell(joined("m1"))
    mortal.keeper.start()
    until("the reports", lambda: len(mortal.of(AgentJoined)) == 2)
    until("the answers", lambda: telling.waiting() == 0)
    assert [type(report) for report in mortal.reports] == [AgentJoined, WorkerLost, AgentJoined]
    telling.close()


def test_a_notice_reaches_the_script(crew: Crew) -> None:
    """Through the keeper, to the workers of that machine: `session.notice_s` counts down."""
    crew.begin(1, WAITS_FOR_A_NOTICE)
    until("the worker", lambda: crew.ready)
    telling = Telling("m1", crew.keeper.address, SECRET)
    notice = Notice(machine_id="m1", kind="terminate", deadline_s=time.time() + 120)
    telling.tell(NoticeSeen(at_s=time.time(), notice=notice))
    crew.completed()
    assert crew.printed() == ["noticed True"]
    assert crew.of(NoticeSeen)[0].notice == notice
    telling.close()


@pytest.mark.parametrize("off_s", [-7200.0, 7200.0])
def test_a_notice_counts_down_alike_where_the_clock_is_off(crew: Crew, off_s: float) -> None:
    """Or is set by a time server meanwhile: a script that saves in its last half minute would do it at once, or never."""
    clock = f"import time\nnow = time.time\ntime.time = lambda: now() + {off_s}\n"
    crew.begin(1, clock + WAITS_FOR_A_NOTICE)
    until("the worker", lambda: crew.ready)
    notice = Notice(machine_id="m1", kind="terminate", deadline_s=time.time() + 120)
    crew.keeper.report(NoticeSeen(at_s=time.time(), notice=notice))
    crew.completed()
    assert crew.printed() == ["noticed True"]


def test_a_machine_that_was_announced_and_not_taken_stays(crew: Crew) -> None:
    """The cloud thinks better of it and says nothing: a script that saves when it has to go would do so in every step."""
    crew.begin(1, WAITS_UNTIL_IT_STAYS)
    until("the worker", lambda: crew.ready)
    notice = Notice(machine_id="m1", kind="terminate", deadline_s=CLOCK.now_s() + 120)
    crew.keeper.report(NoticeSeen(at_s=CLOCK.now_s(), notice=notice))
    assert crew.completed().step == 1


def test_a_stranger_is_not_heard(crew: Crew) -> None:
    """Who does not know the deployment's secret puts nothing into the inbox."""
    stranger = Telling("m1", crew.keeper.address, "a guess")
    stranger.tell(joined("m1"))
    friend = Telling("m2", crew.keeper.address, SECRET)
    friend.tell(joined("m2"))
    until("the friend's report", lambda: crew.of(AgentJoined))
    assert [report.machine_id for report in crew.of(AgentJoined)] == ["m2"]
    assert stranger.waiting() == 1
    stranger.close()
    friend.close()
