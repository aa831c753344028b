"""Who may take part in a job, whoever was lost when: the keeper's side, with workers that are played."""

import time
from pathlib import Path

import msgspec
import pytest
from players import MICROBATCHES, SIZE, House, begun
from waiting import until

from agent.keeper import layouts, proofs
from agent.messages import Progress, Rewound, Unbuilt, WorkerProving
from agent.protocol import Prove, Ready


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "RECONNECT_S", 0.05)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def asked(house: House, name: str) -> list[Prove]:
    return [m for m, _ in house.players[name].line.came if isinstance(m, Prove)]


def comes_back(house: House, name: str) -> None:
    """The keeper is started again, and this worker of the layout that ran is the first to come back."""
    player = house.players[name]
    layout = player.layout
    house.job.forsake()
    house.open()
    house.job.restore(layout)
    player.hello = {"generation": layout.generation, "version": player.version, "proven": True}
    player.come()


def counts(what: str, factor: int = 1):
    """What a script does that counts its own steps."""

    def twist(of: str, version: int, steps: int) -> int:
        return factor * (steps - version) if of == what else 0

    return twist


def test_who_begins_a_job_has_nothing_to_prove(house: House) -> None:
    """And says that it is ready at once."""
    house.joins("a"), house.joins("b")
    assert house.ready == ["a", "b"]
    assert not asked(house, "a")


def test_a_newcomer_proves_itself_before_it_is_ready(house: House) -> None:
    """From a state behind some steps, since what a script counts for itself is right at the beginning."""
    begun(house, "a", commits=6)
    newcomer = house.joins("b")
    (question,) = asked(house, "b")
    assert question.version >= 1 and question.reaches and question.microbatches == (0,)
    assert newcomer.proved == 1
    assert house.ready == ["a", "b"]
    house.lay_out("a", "b")
    house.commits(3)
    assert newcomer.version == house.version and not house.failed


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("batch", "the batch is another on b than on a"),
        ("loss", "the loss is another on b than on a"),
        ("gradient", "the gradient of layer l is another on b than on a"),
        ("state", "the state of layer l is another on b than on a"),
    ],
)
def test_what_a_newcomer_does_otherwise_is_named(house: House, what: str, says: str) -> None:
    """Step, thing and both workers, in one line; it was never ready."""
    begun(house, "a", commits=6)
    house.joins("b", counts(what))
    (told,) = house.failed
    (question,) = asked(house, "b")
    assert told.startswith(f"step {question.script_step}")
    assert says in told and "\n" not in told
    assert house.ready == ["a"]
    house.commits(2)


@pytest.mark.parametrize(
    ("commits", "what"),
    [
        *((commits, "state") for commits in range(1, 7)),
        *((4, what) for what in ("batch", "loss", "gradient")),
    ],
)
def test_all_are_lost_at_any_step(tmp_path: Path, commits: int, what: str) -> None:
    """Right behind a snapshot, before there was any: whoever comes goes on with the same weights, or not at all."""
    house = begun(House(tmp_path, backup_every_steps=2), "a", "b", commits=commits)
    right = house.players["a"].state.copy()
    house.dies("a", "b")
    honest = house.joins("c")
    assert asked(house, "c"), "somebody who proves nothing goes on with the job"
    house.begins("c")
    assert (honest.version, honest.state.tolist()) == (commits, right.tolist())
    assert not [one for one in house.said.reports if isinstance(one, Rewound)]
    house.dies("c")
    house.joins("d", lambda of, version, steps: 1 if of == what else 0)
    told = house.failed
    assert "d" not in house.ready or (what == "state" and not asked(house, "d")[0].reaches)
    assert told or not asked(house, "d")[0].reaches


def test_all_are_lost_right_behind_a_snapshot(tmp_path: Path) -> None:
    """The newest backup has no step behind it: the one before is proven by, and the newest is gone on from."""
    house = begun(House(tmp_path, backup_every_steps=4), "a", commits=5)
    while house.job.vault.backup.version < 7:
        house.commits()
    base = house.job.vault.backup.version
    assert house.version == base
    house.dies("a")
    house.joins("b")
    (question,) = asked(house, "b")
    assert 1 <= question.version < base and question.reaches
    assert house.ready == ["b"]
    house.begins("b")
    house.commits(2)
    house.dies("b")
    house.joins("c", counts("loss"))
    assert house.failed and "c" not in house.ready


def test_a_newcomer_waits_for_the_question(house: House) -> None:
    """The job is brought further by another one: behind a state that is asked for at once."""
    begun(house, "a", commits=1)
    waiting = house.joins("b")
    assert not asked(house, "b") and house.ready == ["a"]
    house.commits(3)
    (question,) = asked(house, "b")
    assert question.version == 2
    assert house.ready == ["a", "b"] and waiting.proved == 1


def test_two_newcomers_prove_themselves_side_by_side(house: House) -> None:
    begun(house, "a", commits=6)
    house.joins("b"), house.joins("c")
    assert house.ready == ["a", "b", "c"]
    house.lay_out("a", "b", "c")
    house.commits(3)
    house.dies("a")
    house.begins("b", "c")
    house.commits(2)
    assert not house.failed


def test_who_was_ready_before_the_first_commit_proves_itself_later(house: House) -> None:
    """A layout with it is not begun before, and the one that runs goes on."""
    house.joins("a"), house.joins("b")
    house.begins("a")
    house.commits(2)
    house.lay_out("a", "b")
    house.commits(2)
    assert asked(house, "b")
    house.commits(1)
    assert house.players["b"].layout is not None and house.players["b"].version == house.version


def test_what_waits_for_a_proof_has_an_end_though_nobody_commits(house: House) -> None:
    """The layout was broken before a step behind a state was known: what is known must do."""
    house.joins("a"), house.joins("b"), house.joins("c")
    house.begins("a", "c")
    house.commits(1)
    house.lay_out("a", "b", when="now")
    house.dies("c")
    house.lay_out("a", "b", when="now")
    house.settles()
    (question,) = asked(house, "b")
    assert question.version == 0 and question.commits == 1
    house.commits(2)
    assert not house.failed


def test_a_proof_whose_connection_broke_begins_again(house: House) -> None:
    begun(house, "a", commits=6)
    house.players["a"].answers = True
    player = house.joins("b")
    house.dies("b")
    house.joins("c").answers = True
    silent = house.players["c"]
    assert player.proved == silent.proved == 1
    house.dies("c")
    late = house.players["d"] = type(silent)(house, "d", silent.twist)
    late.answers = False
    late.come()
    assert len(asked(house, "d")) == 1 and house.ready == ["a"]
    house.commits(12)
    late.answers = True
    late.come()
    assert house.ready == ["a", "d"] and late.proved == 1


def test_the_base_may_move_while_somebody_proves_itself(tmp_path: Path) -> None:
    """It is judged by the question that it was asked."""
    house = begun(House(tmp_path, backup_every_steps=3), "a", commits=6)
    slow = house.joins("b")
    house.dies("b")
    slow = house.players["e"] = type(slow)(house, "e", slow.twist)
    slow.answers = False
    slow.come()
    first = house.job.vault.backup.version
    house.commits(9)
    assert house.job.vault.backup.version > first
    slow.answers = True
    slow.prove()
    assert "e" in house.ready and not house.failed


@pytest.mark.parametrize("phases", [2, 3])
def test_steps_of_several_commits(tmp_path: Path, phases: int) -> None:
    """A proof is a whole step of the script; snapshots are taken where one begins."""
    house = begun(House(tmp_path, phases=phases, backup_every_steps=4), "a", commits=10 * phases)
    house.joins("b")
    (question,) = asked(house, "b")
    assert question.version % phases == 0 and question.version
    assert question.commits == len(question.microbatches) == phases
    assert house.ready == ["a", "b"]
    house.dies("a", "b")
    house.joins("c")
    assert house.ready == ["c"]
    house.dies("c")
    house.joins("d", lambda of, version, steps: (of == "loss") * (version % phases == phases - 1))
    assert f"backward call {phases - 1}" in house.failed[0]


@pytest.mark.parametrize("within", [1, 2, 3, 4, 5, 6])
def test_all_are_lost_between_two_commits_of_a_step(tmp_path: Path, within: int) -> None:
    house = begun(House(tmp_path, phases=2), "a", commits=within)
    right = house.players["a"].state.copy()
    house.dies("a")
    again = house.joins("b")
    house.begins("b")
    assert again.state.tolist() == right.tolist() and house.version == within
    house.dies("b")
    house.joins("c", lambda of, version, steps: int(of == "loss"))
    assert house.failed and "c" not in house.ready


def test_a_keeper_is_started_again_and_workers_come_back(house: House) -> None:
    """Those of the layout that ran have been let in by the keeper before; others prove themselves."""
    begun(house, "a", commits=6)
    comes_back(house, "a")
    house.joins("b")
    assert "b" not in house.ready[1:] and not asked(house, "b")
    house.commits(3)
    house.until("the proof", lambda: house.players["b"].proved)
    assert house.job.roster.members["b"].proven


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_the_only_one_to_come_back_to_a_restarted_keeper_is_lost_as_well(
    tmp_path: Path, memory: Path, where: str
) -> None:
    """What is stored was read for a newcomer's proof, while a worker held more; it is read again without that one."""
    house = House(tmp_path / "disk", backup_every_steps=2)
    house.memory = memory if where == "memory" else None
    house.open()
    begun(house, "a", commits=4)
    house.joins("b")
    house.lay_out("a", "b")
    house.commits(3)
    if where == "disk":
        house.job.write_checkpoint()
        house.until("a checkpoint", lambda: [*(tmp_path / "disk").glob("job/manifests/*")])
    right, version = house.players["a"].state.copy(), house.version
    del house.players["b"]
    comes_back(house, "a")
    house.joins("c")
    house.lay_out("c", when="now")

    def is_read() -> bool:
        """Whether what is stored was read; no player hears anything meanwhile."""
        house.job.tick(time.monotonic(), 0.0)
        return house.job._regrouping._recalled

    until("what is stored", is_read)
    assert house.job.roster.holders() == ("a",) and house.job.vault.backup is None
    house.dies("a")
    house.begins("c")
    house.until("it to go on", lambda: house.players["c"].holds)
    assert (house.version, house.players["c"].state.tolist()) == (version, right.tolist())


def test_a_newer_layout_was_written_and_nobody_had_heard_of_it(house: House) -> None:
    """A worker that was let in, and in no commit yet, is not asked again by the next keeper: it waits for others."""
    begun(house, "a", commits=6)
    house.joins("b")
    house.lay_out("a", "b")
    house.commits(1)  # behind which the layout begins
    layout, players = house.players["a"].layout, house.players
    assert layout is not None and players["b"].layout == layout
    assert players["b"].let_in
    house.job.forsake()
    house.open()
    house.job.restore(msgspec.structs.replace(layout, generation=layout.generation + 1))
    for name in "ba":
        player = players[name]
        proven = name == "a" or player.let_in
        player.hello = {"generation": layout.generation, "version": 7, "proven": proven}
        player.come()
    house.until("the layout", lambda: players["b"].layout.generation > layout.generation)
    assert not asked(house, "b")
    house.commits(3)


def test_a_restarted_keeper_reports_the_newest_commit(house: House) -> None:
    """The keeper before may have died with that report, and no other commit may follow soon."""
    begun(house, "a", commits=6)
    layout = house.players["a"].layout
    house.job.forsake()
    house.said.reports.clear()
    house.open()
    house.job.restore(layout)
    player = house.players["a"]
    ready = Ready(microbatches=MICROBATCHES, steps_total=1000, state_bytes=SIZE)
    here = {"generation": layout.generation, "version": 6, "proven": True}
    player.hello = {**here, "ready": ready}
    player.come()
    steps = [one.step for one in house.said.reports if isinstance(one, Progress)]
    assert steps == [6]


def test_records_lie_with_a_version_on_the_disk(house: House) -> None:
    """A job that was closed is gone on from by who proves itself; another is named."""
    begun(house, "a", commits=8)
    right = house.players["a"].state.copy()
    house.job.close()
    assert house.job.put_away()
    house.players.clear()
    house.open()
    assert house.version == 8
    house.joins("b")
    house.until("the proof", lambda: "b" in house.ready)
    house.begins("b")
    assert house.players["b"].state.tolist() == right.tolist()
    house.dies("b")
    house.joins("c", counts("gradient"))
    assert "gradient" in house.failed[0]


@pytest.mark.parametrize("commits", range(1, 8))
def test_a_job_is_closed_at_any_step(tmp_path: Path, commits: int) -> None:
    """And its keeper ends: whoever goes on is asked, whatever lies there."""
    house = begun(House(tmp_path, backup_every_steps=2), "a", commits=commits)
    right = house.players["a"].state.copy()
    house.job.close()
    assert house.job.put_away()
    house.players.clear()
    house.open()
    house.joins("b")
    house.until("the proof", lambda: house.players["b"].proved)
    house.begins("b")
    assert (house.version, house.players["b"].state.tolist()) == (commits, right.tolist())


@pytest.mark.parametrize("commits", range(1, 8))
def test_the_keeper_and_all_workers_are_lost_at_once(
    tmp_path: Path, memory: Path, commits: int
) -> None:
    """What the keeper had in memory that outlives it has the records as well."""
    house = House(tmp_path / "disk", backup_every_steps=2)
    house.memory = memory
    house.open()
    begun(house, "a", commits=commits)
    right, layout = house.players["a"].state.copy(), house.players["a"].layout
    house.job.forsake()
    house.players.clear()
    house.open()
    house.job.restore(layout)
    house.joins("b")
    house.until("the proof", lambda: house.players["b"].proved)
    house.begins("b")
    assert (house.version, house.players["b"].state.tolist()) == (commits, right.tolist())
    assert not [one for one in house.said.reports if isinstance(one, Rewound)]


def test_a_version_without_records_is_gone_on_from_as_from_a_beginning(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier software wrote it. That is said once; who comes behind the next steps proves itself."""
    begun(house, "a", commits=8)
    monkeypatch.setattr(proofs, "encode", lambda *_: b"")
    house.job.close()
    assert house.job.put_away()
    monkeypatch.undo()
    house.players.clear()
    house.open()
    house.joins("b")
    house.until("being let in", lambda: "b" in house.ready)
    assert len([line for line in house.said.said if "nothing is stored by which" in line]) == 1
    house.begins("b")
    house.commits(4)
    house.joins("c", counts("loss"))
    assert not asked(house, "c")
    house.commits(3)
    assert house.failed, "a state was asked for, because it waits"


def test_records_of_another_script_prove_nothing(house: House) -> None:
    begun(house, "a", commits=8)
    house.job.close()
    assert house.job.put_away()
    house.players.clear()
    house.order = msgspec.structs.replace(house.order, argv=("--lr", "0.1"))
    house.open()
    house.joins("b", counts("loss"))
    house.until("being let in", lambda: "b" in house.ready)
    assert not house.failed


def test_who_holds_only_its_own_layers_is_let_in_and_that_is_said(house: House) -> None:
    begun(house, "a", commits=6)
    unbuilt = Unbuilt(training_bytes=1, room_bytes=1, mark="")
    house.players["a"].member.ready = msgspec.structs.replace(
        house.players["a"].member.ready, unbuilt=unbuilt
    )
    house.joins("b", unbuilt=unbuilt)
    house.joins("c", unbuilt=unbuilt)
    assert house.ready == ["a", "b", "c"]
    assert house.players["a"].unproven == ()
    house.begins("a", "b")
    assert house.players["a"].unproven == ("b",)
    house.commits()
    house.begins("a", "b", "c")
    assert house.players["a"].unproven == ("c",)
    assert len([line for line in house.said.said if "only its own layers" in line]) == 1


def test_what_workers_say_is_compared_before_the_commit(house: House) -> None:
    """Of one version they must have reached the same."""
    house.joins("a")
    house.joins("b", lambda of, version, steps: int(of == "state" and version == 3))
    house.begins("a", "b")
    house.commits(5)
    assert house.failed[0].startswith("step 3: the state of layer l is another on")
    assert house.version == 4


def test_the_sums_of_a_proof_are_sent_whatever_they_cost(tmp_path: Path) -> None:
    """Where no sums are sent, those behind a snapshot are, and all are lost at any step: whoever comes is asked."""
    for commits in range(1, 12):
        house = House(tmp_path / str(commits), backup_every_steps=3, sums="never")
        begun(house, "a", "b", commits=commits)
        house.dies("a", "b")
        house.joins("c", lambda of, version, steps: int(of == "loss"))
        assert asked(house, "c") and house.failed
        assert "c" not in house.ready
    assert MICROBATCHES == 4


def test_unlike_cards_in_one_layout_are_said_once_and_train(house: House) -> None:
    """They are compared within a tolerance, so a job that has them has not the bits of one process."""
    house.joins("a"), house.joins("b", lambda what, *_: int(what == "gradient"))
    house.players["b"].machine = "n"
    house.begins("a", "b")
    house.commits(4)
    assert not house.failed
    said = [line for line in house.said.said if "rounds otherwise" in line]
    assert said == [proofs.UNLIKE.format("b", "a")]


def test_a_newcomer_that_rounds_differently_fails_no_exact_job(house: House) -> None:
    """It is reported, and proves nothing while others are there that round as the job does, far apart as it may be."""
    house.joins("a", hardware="fast")
    house.begins("a")
    house.commits(6)
    house.joins("b", counts("loss"), hardware="slow")
    house.commits(4)
    assert not house.failed and not asked(house, "b") and house.ready == ["a"]
    (told,) = [one for one in house.said.reports if isinstance(one, WorkerProving)]
    assert (told.worker, told.hardware) == ("b", "slow")
    house.joins("c", hardware="fast")
    assert house.ready == ["a", "c"]
    house.dies("b")


def test_a_newcomer_that_rounds_differently_proves_itself_where_nobody_else_is_left(
    house: House,
) -> None:
    """The job goes on with it, as far as the tolerance allows."""
    house.joins("a", hardware="fast")
    house.begins("a")
    house.commits(6)
    house.joins("b", hardware="slow")
    assert not asked(house, "b")
    house.dies("a")
    house.until("the proof", lambda: "b" in house.ready)
    house.begins("b")
    house.commits(2)


def test_with_exact_off_a_newcomer_that_rounds_differently_proves_itself_at_once(
    tmp_path: Path,
) -> None:
    """It may be in a layout with the others."""
    house = House(tmp_path, exact=False)
    house.joins("a", hardware="fast")
    house.begins("a")
    house.commits(6)
    house.joins("b", hardware="slow")
    assert house.ready == ["a", "b"]


def test_a_job_of_which_nothing_is_stored_blames_no_earlier_software(house: House) -> None:
    """Keeper and worker were lost together, without memory or a version on the disk: it begins again, and says so."""
    layout = begun(house, "a", commits=3).players["a"].layout
    assert layout is not None
    house.job.forsake()
    house.players.clear()
    house.open()
    house.job.restore(layout)
    house.joins("b")
    house.until("being let in", lambda: "b" in house.ready)
    (said,) = [line for line in house.said.said if line.startswith("step 3:")]
    assert said == "step 3: no state of the job is stored any more, so it begins again"
    house.begins("b")
    house.commits(1)
    assert house.version == 1
