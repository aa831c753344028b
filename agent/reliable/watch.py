"""How long a worker may be silent, and who is not let in again. Decisions only; the job acts on them."""

SILENT_S = 0.8  # in the layout: the others wait for it
SILENT_EARLY_S = 30.0  # while it imports, builds or records, which may hold up all; or if unawaited
HUNG_S = 30.0  # alive, and nothing happens where nobody is waited for
HUNG_S_MAX = 3600.0  # until then whoever asks for layouts has long seen that nothing is committed
HUNG_BYTES_PER_S = 1e8  # as slow as a state is moved at worst, in one piece
GONE_MAX = 10_000


class Patience:
    """It is twice as long where it has ended at the very same step: a script may hold up all threads there, every time."""

    def __init__(self, bound_s: float, bound_s_max: float) -> None:
        self.bound_s, self._bound_s_max = bound_s, bound_s_max
        self._version = -1  # where it has ended last

    def ended(self, version: int) -> None:
        if self._version == version:
            self.bound_s = min(2 * self.bound_s, self._bound_s_max)
        self._version = version


class Watch:
    def __init__(self) -> None:
        self._gone: dict[str, str] = {}
        self.silent, self.hung = Patience(SILENT_S, SILENT_EARLY_S), Patience(HUNG_S, HUNG_S_MAX)

    def bound_s(self, *, awaited: bool) -> float:
        """How long a worker may say nothing at all."""
        return self.silent.bound_s if awaited else SILENT_EARLY_S

    def hung_bound_s(self, state_bytes: int) -> float:
        """For how long a worker with so much state may do nothing, and be alive."""
        return self.hung.bound_s + state_bytes / HUNG_BYTES_PER_S

    def shut_out(self, worker: str, why: str) -> None:
        """It never comes back: what it holds may be of a past that the job has left."""
        self._gone[worker] = why
        while len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]

    def gone(self, worker: str) -> str | None:
        return self._gone.get(worker)
