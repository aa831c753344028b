"""A log of commits that need not outlive its process."""

import threading

from agent.errors import Fenced
from agent.keeper.commits import Commit
from agent.messages import Rewound


class MemoryCommitLog:
    """For a keeper whose commits need not outlive it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, tuple[int, Commit]] = {}

    def take(self, job: str) -> tuple[int, Commit]:
        with self._lock:
            term, newest = self._jobs.get(job, (0, Commit()))
            self._jobs[job] = (term + 1, newest)
            return self._jobs[job]

    def strike(self, job: str) -> None:
        with self._lock:
            self._jobs[job] = (self._jobs[job][0], Commit())

    def write(self, job: str, term: int, commit: Commit) -> None:
        self._put(job, term, commit, back=False)

    def rewind(self, job: str, term: int, commit: Commit, told: Rewound) -> None:
        self._put(job, term, commit, back=True)

    def _put(self, job: str, term: int, commit: Commit, *, back: bool) -> None:
        with self._lock:
            held_term, newest = self._jobs[job]
            if term != held_term:
                raise Fenced(f"{job}: term {term} tried to write, but term {held_term} has begun")
            if commit.generation < newest.generation:
                raise Fenced(
                    f"{job}: generation {commit.generation} is older than {newest.generation}"
                )
            if not back and commit.version not in (newest.version, newest.version + 1):
                raise Fenced(f"{job}: version {commit.version} does not follow {newest.version}")
            self._jobs[job] = (term, commit)
