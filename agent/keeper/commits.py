"""Where commits are written down: the one fact about a job that must never be in doubt.

A keeper that starts takes the log over by raising its term. After that, writes of earlier keepers
are refused, and so is a generation older than the newest. If the answer to a write was lost, the
same commit may be written again: the same commit twice is one commit.
"""

import re
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from agent.errors import Fenced, RecordError
from agent.keys import INBOX, commit_key
from agent.messages import Rewound
from cloud.clock import CLOCK

PLACE = re.compile(rb"(\d+) (-1|\d+) (\d+) ([1-9]\d*)")


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """`version` steps of the job are committed.

    A step of the script has up to `phases` commits, and this one is its commit `phase`, counted
    from 0; `script_step` is -1 if that is not known.
    """

    generation: int = -1
    version: int = 0
    loss: float | None = None
    script_step: int = -1
    phase: int = 0
    phases: int = 1


class CommitLog(Protocol):
    def take(self, job: str) -> tuple[int, Commit]:
        """Become the only writer. Return the new term and newest commit, or raise `RecordError`."""

    def strike(self, job: str) -> None:
        """Delete a log that makes no sense any more, so that the next keeper begins a new one."""

    def write(self, job: str, term: int, commit: Commit) -> None:
        """Write the next commit, or raise `Fenced`."""

    def rewind(self, job: str, term: int, commit: Commit, told: Rewound) -> None:
        """Go back to an earlier version, and notify the manager: both, or neither.

        That is because the state of everything newer is lost.
        """


class History:
    """The commits of one job, for the keeper that took its log over and writes them."""

    def __init__(self, log_: CommitLog, job: str) -> None:
        self._log, self.job = log_, job
        # Converts a version to steps of the script, in which the manager counts.
        self.steps: Callable[[int], int] = lambda version: version
        self._term, self._newest = log_.take(job)

    @property
    def first(self) -> bool:
        """Whether no keeper has taken this log before."""
        return self._term == 1

    @property
    def term(self) -> int:
        """Which keeper of this log we are; each later one has a larger term."""
        return self._term

    @property
    def version(self) -> int:
        """How many steps are committed."""
        return self._newest.version

    @property
    def generation(self) -> int:
        """The generation of the newest commit; -1 if there is none."""
        return self._newest.generation

    def wrote(self, generation: int, step: int) -> bool:
        """Whether this step, in this generation, is the newest that was committed.

        Only a worker that was suspended asks for an older one, and other workers have done that
        since.
        """
        return (generation, step + 1) == (self.generation, self.version)

    @property
    def newest(self) -> Commit:
        return self._newest

    @property
    def loss(self) -> float | None:
        return self._newest.loss

    def take(self) -> tuple[int, Commit]:
        """Become the only writer again, however long Redis is away, but change nothing in memory.

        `resume` takes over the result.
        """
        return self._log.take(self.job)

    def resume(self, term: int, newest: Commit) -> bool:
        """Take over the result of `take`. Return whether the version is unchanged since."""
        same = newest.version == self.version
        self._term, self._newest = term, newest
        return same

    def write(self, commit: Commit) -> None:
        """Write a commit, however long that takes, or raise `Fenced`.

        The version here changes only when `note` is called.
        """
        self._log.write(self.job, self._term, commit)

    def note(self, commit: Commit) -> None:
        self._newest = commit

    def rewind(self, version: int) -> None:
        """Go back because the state of everything newer is lost, or raise `Fenced`."""
        generation, phases = max(self.generation, 0), self._newest.phases
        commit = Commit(generation=generation, version=version, loss=None, phases=phases)
        told = Rewound(
            at_s=CLOCK.now_s(),
            job=self.job,
            from_step=self.steps(self.version),
            to_step=self.steps(version),
        )
        self._log.rewind(self.job, self._term, commit, told)
        self._newest = commit


_SEAL = """
local function seal(generation, step, loss)
  return redis.sha1hex(generation .. ' ' .. step .. ' ' .. loss)
end
"""

_TAKE = (
    _SEAL
    + """
local held = redis.call('HMGET', KEYS[1], 'term', 'generation', 'step', 'loss', 'seal', 'place')
if held[1] and not string.match(held[1], '^%d+$') then return 'term' end
if held[5] and held[5] ~= seal(held[2] or '', held[3] or '', held[4] or '') then return 'step' end
if held[2] and not (tonumber(held[2]) and tonumber(held[3])) then return 'step' end
local term = redis.call('HINCRBY', KEYS[1], 'term', 1)
return {term, held[2] or '-1', held[3] or '0', held[4] or '', held[6] or ''}
"""
)

_STRIKE = """
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'term', redis.call('TIME')[1])
"""

_WRITE = (
    _SEAL
    + """
local held = redis.call('HMGET', KEYS[1], 'term', 'generation', 'step')
if held[1] ~= ARGV[1] then
  return 'term ' .. ARGV[1] .. ' tried to write, but the term is ' .. (held[1] or 'none')
end
if tonumber(ARGV[2]) < tonumber(held[2] or '-1') then
  return 'generation ' .. ARGV[2] .. ' is older than ' .. held[2]
end
local step, newest = tonumber(ARGV[3]), tonumber(held[3] or '0')
if ARGV[5] == '' and step ~= newest and step ~= newest + 1 then
  return 'version ' .. ARGV[3] .. ' does not follow ' .. newest
end
local sealed = seal(ARGV[2], ARGV[3], ARGV[4])
redis.call('HSET', KEYS[1], 'generation', ARGV[2], 'step', ARGV[3], 'loss', ARGV[4], 'seal', sealed,
  'place', ARGV[6])
if ARGV[5] ~= '' then redis.call('XADD', KEYS[2], '*', 'e', ARGV[5]) end
return ''
"""
)


class RedisCommitLog:
    """The hash `orch:commit:{job}`, written by a Redis script so that check and write are one."""

    def __init__(self, client: Any) -> None:
        self._take = client.register_script(_TAKE)
        self._write, self._strike = client.register_script(_WRITE), client.register_script(_STRIKE)

    def take(self, job: str) -> tuple[int, Commit]:
        answer = self._take(keys=[commit_key(job)])
        if isinstance(answer, bytes):
            raise RecordError(f"the {answer.decode()} in {commit_key(job)} in Redis is damaged")
        term, generation, version, loss, place = answer
        commit = Commit(
            generation=int(generation), version=int(version), loss=float(loss) if loss else None
        )
        return int(term), _placed(commit, place)

    def strike(self, job: str) -> None:
        """Delete the log, and set a term that no earlier keeper had."""
        self._strike(keys=[commit_key(job)])

    def write(self, job: str, term: int, commit: Commit) -> None:
        self._put(job, term, commit)

    def rewind(self, job: str, term: int, commit: Commit, told: Rewound) -> None:
        self._put(job, term, commit, msgspec.json.encode(told))

    def _put(self, job: str, term: int, commit: Commit, told: bytes = b"") -> None:
        loss = "" if commit.loss is None else repr(commit.loss)
        place = f"{commit.version} {commit.script_step} {commit.phase} {commit.phases}"
        arguments = [term, commit.generation, commit.version, loss, told, place]
        refusal = self._write(keys=[commit_key(job), INBOX], args=arguments)
        if refusal:
            text = refusal.decode() if isinstance(refusal, bytes) else str(refusal)
            raise Fenced(f"{job}: {text}")


def _placed(commit: Commit, place: bytes) -> Commit:
    """Return a commit with its place in the script, if that was noted with this very commit."""
    found = PLACE.fullmatch(place)
    if found is None:
        return commit
    version, step, phase, phases = map(int, found.groups())
    if version != commit.version:  # earlier software, which notes no places, has written it
        step, phase = -1, 0
    return msgspec.structs.replace(commit, script_step=step, phase=phase, phases=phases)
