"""The base of every error of the orchestrator, and where each is defined.

OrchestratorError
├── ConfigError              config: a setting is unknown or wrong
├── StateDirError            places: the state directory cannot be used
├── HouseError               house.house: a part cannot be started or kept
│   └── ToldToEnd            it was asked to end before it was ready
├── RedisUnavailable         house.redis_server: no server, or it cannot be started
├── NotRunning               client: no house lives in this state directory
│   ├── Killed               a house lived there and ended without removing its file
│   └── Between              a house is starting or ending
├── Unread                   client: too much waits for the manager
├── Silent                   client: Redis does not answer; a `redis.ConnectionError` too
│   └── NoRoom               Redis cannot answer before the disk has room
├── Refused                  wishes: the manager would do nothing about it
├── Superseded               world: a newer manager took over
├── Diverged                 world: a replayed decision differs from the journal's
├── Unreadable               journal: it is damaged, or of another version
├── NotTaken                 history.outside.otlp: a collector does not take traces
├── IllegalTransition        state: a lease or a job may not change its state like that
├── EngineError              live.world: an agent or the keeper was not reached
│   └── NoAgent              live.world: a machine is no node of this cluster
├── CommandError             cli.command: a command cannot be carried out; it has an exit code
├── DemoFailed               cli.demo: the demonstration showed something else
├── Unready                  rehearsal.stage: the rehearsal cannot be set up
├── Fault                    rehearsal.rehearsed_job: the rehearsal found something
│   └── TooShort             the script ends before anything can happen to it
└── MorphError               morph.errors: the planner refuses; its own tree is there
"""


class OrchestratorError(Exception):
    """An error whose message says to a person what is wrong, why, and what to do."""
