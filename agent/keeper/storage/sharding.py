"""Which way the state of a job goes, and when: through the keeper, or straight to the store.

A pure decision, with clocks handed in; the vault does what follows from it. No torch here.
"""

import msgspec

from agent.keeper.storage.backup import StateAssembly
from agent.messages import JobOrder, Sums
from agent.profile import Profile

TOLL = 0.02  # of a step, or of the time between two snapshots: what may pass the keeper meanwhile
SMALL_STATE_BYTES = 1 << 26  # the keeper loses no step, and passing a smaller state is never costly
LARGE_SUM_BYTES = 1 << 24  # is sent only where it is the only way to keep every step
SMALL_SUM_BYTES = 1 << 20  # passing a smaller sum is never costly
LARGE_STATE_BYTES = 1 << 30  # goes to the store before any step was timed
SHARE = 0.1  # of a worker's network
LINK_BYTES_S = 1.25e9  # 10 Gbit/s, until a network was measured
HELD = 3  # states' worth of bytes in the keeper's memory: the backup, the next one, and sums
MEMORY_PART = 0.5  # of its machine's memory, which these may fill
REFUSALS_MAX = 3
AGAIN_S = 5.0  # until the next try after one that failed


class Passing(msgspec.Struct, frozen=True, kw_only=True):
    """What would pass the keeper, and how fast."""

    state_bytes: int
    sum_bytes: int
    every: int  # steps between two states
    step_s: float  # 0 is unknown
    bytes_s: float
    memory_bytes: int  # of the keeper's machine

    @property
    def held_bytes(self) -> int:
        return HELD * self.state_bytes

    @property
    def crowds(self) -> bool:
        """Whether the keeper's machine lacks the memory for it."""
        return self.held_bytes > MEMORY_PART * self.memory_bytes

    @property
    def costly(self) -> bool:
        """Whether the keeper would cost more than its toll, or more memory than its machine has."""
        if self.crowds:
            return True
        if self.state_bytes < SMALL_STATE_BYTES:
            return False
        if not self.step_s:
            return self.state_bytes >= LARGE_STATE_BYTES
        a_step = self.sum_bytes + self.state_bytes / self.every
        return a_step > TOLL * self.step_s * self.bytes_s

    def delays(self, toll: float, max_replay_s: float) -> bool:
        """Whether sums cost more than this toll, and steps since a state may be trained again."""
        if self.sum_bytes < SMALL_SUM_BYTES:
            return False
        again_s = self.every * self.step_s + 2 * self.state_bytes / self.bytes_s
        return self.sum_bytes > toll * self.step_s * self.bytes_s and again_s <= max_replay_s


def room_for_sums(state_bytes: int, memory_bytes: int) -> int:
    """Return how many bytes of sums a keeper may hold beside the backup and the next one.

    It is a state's worth at least, so a job whose states do not fit goes on all the same.
    """
    return max(state_bytes, int(MEMORY_PART * memory_bytes) - (HELD - 1) * state_bytes)


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What a loss of all machines costs a job whose steps are not at the keeper."""

    writes_s: float  # a snapshot
    mean_s: float
    most_s: float
    stored: bool = True  # straight into the store; else in the keeper's memory


def replay(passing: Passing, machines: int, link_bytes_s: float, max_replay_s: float) -> Replay:
    """Foretell what is trained again if so many machines write the state, and all is lost."""
    writes_s = passing.state_bytes / (machines * SHARE * link_bytes_s)
    every_s = between(writes_s, max_replay_s)
    most_s = every_s + writes_s + passing.step_s
    return Replay(writes_s=writes_s, mean_s=writes_s + every_s / 2, most_s=most_s)


def replay_here(passing: Passing, max_replay_s: float) -> Replay:
    """Foretell what is trained again if all is lost, where states pass the keeper and sums do not."""
    took_s = passing.state_bytes / passing.bytes_s
    delays = passing.delays(TOLL, max_replay_s)
    every_s = max(
        passing.every * passing.step_s, took_s + rest_s(took_s, max_replay_s, delays=delays)
    )
    most_s = every_s + took_s + passing.step_s
    return Replay(writes_s=took_s, mean_s=took_s + every_s / 2, most_s=most_s, stored=False)


def rest_s(took_s: float, max_replay_s: float, *, delays: bool) -> float:
    """Return how long after a state that passed the keeper no other one is asked for.

    That is as long as the state took. Where even sums `delay` steps, states take no more than the
    toll, and the newest one is never older than `max_replay_s`, if that can be had.
    """
    return max(took_s, min(took_s / TOLL, max_replay_s - 2 * took_s)) if delays else took_s


def between(took_s: float, max_replay_s: float) -> float:
    """Return from one snapshot's beginning to the next one's.

    The newest complete one is then never older than `max_replay_s`, if two in a row can be written
    in that time.
    """
    return max(took_s, max_replay_s - took_s)


def sums_pass(
    policy: Sums, sum_bytes: int, copies: int, *, delays: bool, parted: bool = False
) -> bool:
    """Return whether every step waits until its sum is at the keeper.

    `copies` is the number of machines that could go on alone; `parted` is whether one copy is of
    several machines. If the keeper has the sum, no loss of workers costs a step. Without it the
    steps since the newest state are computed again. So a sum is not sent if it holds steps up more
    than such a loss may cost, or if it is large and two machines, which are seldom lost at once,
    have the state.
    """
    if policy == "always":
        return True
    if copies > 1:
        return policy == "auto" and not delays and sum_bytes < LARGE_SUM_BYTES
    return copies < 1 or parted or not delays


def may_pass_by(sums: Sums, *, has_store: bool) -> bool:
    """Whether workers may write states into the store themselves."""
    return has_store and sums != "always"


class Sharding:
    """Not locked itself, as the vault that it belongs to."""

    def __init__(self, order: JobOrder, *, has_store: bool) -> None:
        self._may = may_pass_by(order.sums, has_store=has_store)
        self.max_replay_s = order.max_replay_s
        self.on = False
        self.sums_delay = False
        """Whether every step would wait long for its sum, as far as steps have been timed."""
        self.whole: StateAssembly | None = None  # written by all workers, and no version yet
        self.hurried = False  # a checkpoint is asked for
        self._refusals: int | None = 0  # in a row; None when the store has taken one
        self._begun_s, self.took_s, self._again_s = 0.0, 0.0, 0.0
        self.link_bytes_s = self.keeper_bytes_s = LINK_BYTES_S

    def choose(self, passing: Passing) -> None:
        """Decide for the store if the keeper is too costly; a job that went over stays.

        Sums that cost too much are sent again when they cost half as much as they may.
        """
        self.on |= self._may and passing.costly
        if passing.step_s:
            toll = TOLL / 2 if self.sums_delay else TOLL
            self.sums_delay = passing.delays(toll, self.max_replay_s)

    def measured(self, profile: Profile) -> None:
        """Take note of the network between workers."""
        if profile.network_from in ("between", "measured"):
            self.link_bytes_s = profile.network.inter.bandwidth_bytes_per_s

    def passed(self, count: int, seconds: float) -> None:
        """Take note of how long a state took to the keeper."""
        if seconds > 0 and count >= SMALL_STATE_BYTES:
            self.keeper_bytes_s = count / seconds

    def rest_s(self, took_s: float) -> float:
        """Return how long no other state is asked for after one that took so long."""
        return rest_s(took_s, self.max_replay_s, delays=self.sums_delay)

    def bytes_s(self, crowd: int) -> int:
        """Return how fast each of so many workers of one machine may write."""
        return max(1, int(SHARE * self.link_bytes_s / max(1, crowd)))

    @property
    def every_s(self) -> float:
        return between(self.took_s, self.max_replay_s)

    def due(self, now_s: float) -> bool:
        return self.free(now_s) and self._is_time(now_s)

    def free(self, now_s: float) -> bool:
        """Whether a snapshot may begin: none is about to become a version, and none has failed just now."""
        return self.whole is None and now_s >= self._again_s

    def _is_time(self, now_s: float) -> bool:
        return self.hurried or not self._begun_s or now_s >= self._begun_s + self.every_s

    def spares(self, sum_bytes: int) -> bool:
        """Whether a sum for each snapshot would be too much for the keeper."""
        return sum_bytes > TOLL * self.every_s * self.keeper_bytes_s

    # --- what happens -----------------------------------------------------------------------------

    def begin(self, now_s: float) -> None:
        self._begun_s, self.hurried = now_s, False

    def succeed(self, now_s: float) -> None:
        self.took_s, self._refusals = now_s - self._begun_s, None

    def again(self) -> None:
        """Begin a snapshot as soon as may be, because one was given up half way."""
        self._begun_s = 0.0

    def fail(self, now_s: float) -> None:
        """Try again soon; but a store that never took one is given up, and the keeper helps."""
        self.whole, self._begun_s, self._again_s = None, 0.0, now_s + AGAIN_S
        if self._refusals is not None:
            self._refusals += 1
            self.on = self._may = self._refusals < REFUSALS_MAX
