"""The journal in Redis: durable before anything is done, closed to older epochs.

Each kind of write is one Lua script that compares the epoch and writes in one step, so a superseded
manager cannot write an entry, even if it wakes up after a long pause. The script that appends an
event from the inbox also marks it as read, so the event is handled once. Every turn has a name, so
an append that is repeated because its answer was lost still makes only one entry.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import redis.asyncio

from agent.checksum import seal_of
from agent.errors import RecordError
from agent.keys import EPOCH, HOUSE, INBOX, INBOX_READ, JOURNAL, SNAPSHOT, TURN
from orchestrator.actions import AnyAction
from orchestrator.errors import OrchestratorError
from orchestrator.events import AnyEvent
from orchestrator.state import State
from orchestrator.world import Entry, Superseded, decode_state, encode_state

ENTRIES_KEPT = 20_000
BYTES_KEPT = 64 << 20  # in Redis's memory, of entries that the newest snapshot has in it
LOAD_BATCH = 1_000


class Unreadable(OrchestratorError):  # noqa: N818 - it names what is the case
    """What is in Redis was not written by this version of the manager, or is damaged."""


_APPEND = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('SUPERSEDED') end
local last = redis.call('HMGET', KEYS[5], 'turn', 'id')
if last[1] == ARGV[6] then return last[2] end
local id = redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'e', ARGV[2], 'a', ARGV[3], 's', ARGV[7])
redis.call('HSET', KEYS[5], 'turn', ARGV[6], 'id', id)
if ARGV[4] ~= '' then
  redis.call('SET', KEYS[3], ARGV[4])
  redis.call('XDEL', KEYS[4], ARGV[4])
end
return id
"""

_SNAPSHOT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('SUPERSEDED') end
redis.call('HSET', KEYS[2], 'id', ARGV[2], 'state', ARGV[3], 's', ARGV[4])
redis.call('XTRIM', KEYS[3], 'MAXLEN', '~', ARGV[5])
return 1
"""


_PUBLISH = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('SUPERSEDED') end
for n = 2, #KEYS do redis.call('SET', KEYS[n], ARGV[n]) end
return 1
"""


class RedisJournal:
    """The journal of the live world.

    `take_over` comes first, because it makes this manager the only one that may write.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._redis = client
        self._epoch = 0
        # Random for each life of the manager, and short, because a launch token has at most 64
        # characters.
        self.salt = secrets.token_hex(5)
        self._turn = 0
        self._last_id = "0-0"
        self._encoder = msgspec.json.Encoder()
        self._append = client.register_script(_APPEND)
        self._snapshot = client.register_script(_SNAPSHOT)
        self._publish = client.register_script(_PUBLISH)
        self.inbox_id = ""  # id of the event being handled, if it came from the inbox

    @property
    def epoch(self) -> int:
        return self._epoch

    async def take_over(self, house: str = "") -> int:
        """Begin a new epoch, so that Redis refuses every write of an earlier manager; return it."""
        async with self._redis.pipeline(transaction=True) as both:
            both.incr(EPOCH)  # queued, like the next: only `execute` is waited for
            both.set(HOUSE, house)
            answers: Any = await both.execute()
        self._epoch = int(answers[0])
        return self._epoch

    async def holder(self) -> str:
        """Return the life of a house that the newest manager belongs to."""
        house: Any = await self._redis.get(HOUSE)
        return house.decode() if house else ""

    async def append(self, event: AnyEvent, actions: Sequence[AnyAction]) -> None:
        self._turn += 1
        what, then = self._encoder.encode(event), self._encoder.encode(list(actions))
        words = [
            self._epoch,
            what,
            then,
            self.inbox_id,
            ENTRIES_KEPT,
            f"{self._epoch}:{self._turn}",
            seal_of(what, then),
        ]
        keys = [EPOCH, JOURNAL, INBOX_READ, INBOX, TURN]
        self._last_id = await self._fenced(self._append, keys, words)

    async def snapshot(self, state: State) -> None:
        """Write the state down; of the journal before it, only so many bytes stay."""
        data = encode_state(state)
        seal = seal_of(self._last_id.encode(), data)
        words = [self._epoch, self._last_id, data, seal, await self._entries_kept()]
        await self._fenced(self._snapshot, [EPOCH, SNAPSHOT, JOURNAL], words)

    async def _entries_kept(self) -> int:
        """Return how many entries fit into `BYTES_KEPT`: a list of many machines is a large one."""
        count: Any = await self._redis.xlen(JOURNAL)
        used: Any = await self._redis.memory_usage(JOURNAL)
        return int(min(ENTRIES_KEPT, count * BYTES_KEPT // (used or 1)))

    async def publish(self, shown: Mapping[str, bytes]) -> None:
        """Show the state under these keys, unless a newer manager shows its own."""
        await self._fenced(self._publish, [EPOCH, *shown], [self._epoch, *shown.values()])

    async def load(self) -> tuple[State | None, Sequence[Entry]]:
        try:
            return await self._load()
        except (ValueError, KeyError, RecordError) as error:
            raise Unreadable(
                f"the journal in Redis cannot be read after {self._last_id} ({error}): it is damaged, or of a later "
                "version. Put a copy of the state directory's redis/ in its place; or move redis/ away, `orchestrator "
                "up`, which gives back what is held, and hand the jobs in again with submit --from"
            ) from error

    async def _load(self) -> tuple[State | None, Sequence[Entry]]:
        saved: Any = await self._redis.hgetall(SNAPSHOT)
        if saved:
            _look_at_seal(SNAPSHOT, saved, b"id", b"state")
        state = decode_state(saved[b"state"]) if saved else None
        self._last_id = saved[b"id"].decode() if saved else "0-0"
        entries: list[Entry] = []
        while rows := await self._rows_after(self._last_id):
            for key, fields in rows:
                entries.append(_entry(fields))
                self._last_id = key.decode()
        return state, entries

    async def _rows_after(self, key: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        rows: Any = await self._redis.xrange(JOURNAL, min=f"({key}", count=LOAD_BATCH)
        return list(rows)

    async def _fenced(self, script: Any, keys: list[str], words: list[Any]) -> str:
        try:
            answer = await script(keys=keys, args=words)
        except redis.exceptions.ResponseError as error:
            if "SUPERSEDED" in str(error):
                raise Superseded(
                    f"a newer manager took over; epoch {self._epoch} may not write any more"
                ) from error
            raise
        return answer.decode() if isinstance(answer, bytes) else str(answer)


def page_after(client: "redis.Redis", key: str) -> list[tuple[str, Entry]]:
    """Return a page of the journal after an id, as (id, entry), oldest first."""
    rows = cast("list[Any]", client.xrange(JOURNAL, min=f"({key}", count=LOAD_BATCH))
    try:
        return [(name.decode(), _entry(fields)) for name, fields in rows]
    except (ValueError, KeyError, RecordError) as error:
        raise Unreadable(
            f"the journal in Redis cannot be read after {key} ({error}): it is damaged, or of another version; "
            "look with: orchestrator check"
        ) from error


def _entry(fields: dict[bytes, bytes]) -> Entry:
    _look_at_seal(JOURNAL, fields, b"e", b"a")
    return Entry(
        event=msgspec.json.decode(fields[b"e"], type=AnyEvent),
        actions=msgspec.json.decode(fields[b"a"], type=tuple[AnyAction, ...]),
    )


def _look_at_seal(where: str, fields: dict[bytes, bytes], *names: bytes) -> None:
    """Raise `RecordError` if a record does not match its seal.

    Records without a seal pass, because earlier versions of the software wrote none.
    """
    if fields.get(b"s", b"") not in (b"", seal_of(*(fields[name] for name in names))):
        raise RecordError(f"{where} does not match its seal")
