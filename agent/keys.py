"""Every key in Redis, with its type and how long it lives. No torch here.

"Overwritten" means that there is one key, for ever. "Forgotten" means that the keys of a job are
removed when 1500 jobs were closed after it (`agent.keeper.storage.retention`); its lines and numbers
also when those of the jobs closed after it take 256 MiB.
"""

# --- the manager's journal ----------------------------------------------------------------------

# Integer, overwritten. A manager takes over by raising it; what an older one writes is refused.
EPOCH = "orch:epoch"
# String, overwritten: which life of which house the newest manager belongs to.
HOUSE = "orch:house"
# Stream of `e` (event), `a` (actions), `s` (seal); about the newest 20,000, or 64 MiB of them.
JOURNAL = "orch:journal"
# Hash, overwritten: name and id of the newest turn, so that a repeated append is one entry.
TURN = "orch:journal:turn"
# Hash, overwritten: the state, and the id of the last journal entry in it.
SNAPSHOT = "orch:snapshot"
# Stream of `e` (event); an entry leaves with the journal entry that handles it.
INBOX = "orch:inbox"
# Stream of `e` (event), `entry` (its id in the inbox), `why`; the newest 100 that were set aside.
INBOX_ASIDE = "orch:inbox:aside"
# Hash, overwritten: the entry that the newest manager found waiting and tried last, and how often.
INBOX_TRIED = "orch:inbox:tried"
# String, overwritten: the id of the last inbox entry that the journal holds.
INBOX_READ = "orch:inbox:read"

# --- what the manager shows ---------------------------------------------------------------------

# JSON of `orchestrator.view.View`, overwritten up to five times a second: its sign of life, too.
VIEW = "orch:view"
# String, overwritten every few seconds: the sign of life of a manager that compiles, before it has a view.
COMPILES = "orch:manager:compiles"
# JSON of `orchestrator.history.records.Reading`, overwritten about once a second: what costs money.
READING = "orch:reading"
# Stream of `e` (`orchestrator.view.Sentence`); about the newest 10,000.
EVENTS = "orch:events"

# --- the join door ------------------------------------------------------------------------------

# JSON of `orchestrator.door.guests.Guests`, overwritten with the view: who is expected, and the
# manager's sign of life for machines.
GUESTS = "orch:door:guests"
# Hash: the digest of each joined machine's claim, by the machine; the newest 10,000 at least.
JOINED = "orch:door:joined"
# Sorted set: joined machines by when they joined; as many as in `JOINED`.
JOINED_AT = "orch:door:joined:at"

# --- scripts ------------------------------------------------------------------------------------

# Sorted set of checksums by when they were submitted. Above 2000 scripts or 256 MiB the oldest that
# no job needs are removed, each with its `submitted_key`.
SCRIPTS = "orch:scripts"


def submitted_key(sha: str) -> str:
    """Bytes: a script with its files, as long as its checksum is in `SCRIPTS`."""
    return f"orch:script:{sha}"


def script_key(job: str) -> str:
    """Bytes: the keeper's copy of the job's script, until the job's state is on the disk."""
    return f"orch:jobs:script:{job}"


# --- the keeper ---------------------------------------------------------------------------------

# String, overwritten every few seconds: the keeper's sign of life.
PULSE = "orch:keeper:pulse"
# Hash, for ever: the port that each keeper listened on last, by the checkpoint folder of its house.
PORTS = "orch:keeper:ports"
# Hash of `OpenJob` by job: from the order until the job's state is on the disk.
OPEN_JOBS = "orch:jobs:open"
# The same of closed jobs whose newest steps are in memory only, until they are on the disk.
KEPT_JOBS = "orch:jobs:kept"
# Sorted set: jobs by when they were closed; at most 1500.
CLOSED_JOBS = "orch:jobs:closed"
# Set: jobs whose timeline of a step was asked for, until it is recorded.
TRACES_ASKED = "orch:trace:asked"


def outbox_key(outbox: str) -> str:
    """Integer: the last batch that this outbox delivered; removed a month after that."""
    return f"orch:outbox:{outbox}"


# --- one job ------------------------------------------------------------------------------------


def commit_key(job: str) -> str:
    """Hash: term, generation, step, loss, seal; until the job is forgotten."""
    return f"orch:commit:{job}"


def log_key(job: str) -> str:
    """Stream of `worker`, `line`; about the newest 10,000, until the job is forgotten."""
    return f"orch:log:{job}"


def metrics_key(job: str) -> str:
    """Stream of `step`, `numbers`; about the newest 100,000, until the job is forgotten."""
    return f"orch:metrics:{job}"


def manifest_key(job: str) -> str:
    """List of `CheckpointWritten`, newest first; 100 of them, until the job is forgotten."""
    return f"orch:manifest:{job}"


def timeline_key(job: str) -> str:
    """JSON: the newest step that was recorded; for a day."""
    return f"orch:timeline:{job}"


def job_profile_key(job: str) -> str:
    """JSON: what was measured of the job's model; for a month."""
    return f"orch:job:profile:{job}"


def profile_key(profile: str) -> str:
    """JSON: what was measured of a model, by a key of what it depends on; for a month."""
    return f"orch:profile:{profile}"


def forgotten_keys(job: str) -> tuple[str, ...]:
    """Return the keys that are removed when a job is forgotten."""
    return (
        commit_key(job),
        log_key(job),
        metrics_key(job),
        manifest_key(job),
        script_key(job),
    )
