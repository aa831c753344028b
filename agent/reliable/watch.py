"""How long a worker may be silent, and who is not let in again. Decisions only; the job acts on them."""

SILENT_S = 0.8  # in the layout: the others wait for it
SILENT_EARLY_S = 30.0  # while it imports, builds or records, which may hold up all; or if unawaited
GONE_MAX = 10_000


class Watch:
    def __init__(self) -> None:
        self._gone: dict[str, str] = {}
        self._silent_s, self._silent_version = SILENT_S, -1  # our patience, and where it last ended

    def bound_s(self, *, awaited: bool) -> float:
        """How long a worker may say nothing at all."""
        return self._silent_s if awaited else SILENT_EARLY_S

    def wait_longer(self, version: int) -> None:
        """Silent again at the very same step: a script may hold up all threads there, every time."""
        if self._silent_version == version:
            self._silent_s = min(2 * self._silent_s, SILENT_EARLY_S)
        self._silent_version = version

    def shut_out(self, worker: str, why: str) -> None:
        """It never comes back: what it holds may be of a past that the job has left."""
        self._gone[worker] = why
        while len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]

    def gone(self, worker: str) -> str | None:
        return self._gone.get(worker)
