"""The program in a notebook: submit, wait, stream, and what a chart needs, as plain values.

    from orchestrator import Client
    client = Client()                                  # the settings of this folder
    job = client.submit("train.py", "--steps", "500", budget_usd=2.0)
    for now in job.stream(): print(now.step, now.loss)
    pandas.DataFrame(job.metrics())                    # or matplotlib: plot(m["step"], m["loss"])

It goes the way of the command line: the same settings, the same wishes, the same refusals, the same
history. What cannot be done raises an `OrchestratorError` with one sentence.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator import wishes
from orchestrator.cli.jobs import LOOK_S, TAKEN_S_MAX, all_jobs, find
from orchestrator.cli.pack import pack, start_of
from orchestrator.cli.submit import order_of, with_script
from orchestrator.cli.watch import looks
from orchestrator.client import Checkpoint
from orchestrator.client import Client as House
from orchestrator.config import Config, load
from orchestrator.dashboard.past import Asked, Footprint, footprint
from orchestrator.events import JobBranched, JobSubmitted
from orchestrator.formatting import duration
from orchestrator.history.reader import History
from orchestrator.history.records import By, Happening, Spent
from orchestrator.kinds import Kind
from orchestrator.paths import Places
from orchestrator.view import JobView, View

BY = "a notebook"
POINTS = 300


class Job:
    """One job of a `Client`. `id` is its name for every command."""

    def __init__(self, client: "Client", name: str) -> None:
        self._client, self.id = client, name

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    def view(self) -> JobView:
        """Return what the manager shows of the job now."""
        return find(self._client.house, self.id)

    def stream(self) -> Iterator[JobView]:
        """Yield what is shown of the job whenever that changes, until it has ended."""
        before: JobView | None = None
        for look in looks(self._client.house, self.id):
            if look.job != before:
                before = look.job
                yield look.job
            if look.job.status in wishes.ENDED:
                return

    def wait(self, timeout_s: float | None = None) -> JobView:
        """Return the job once it has ended; raise `TimeoutError` if that takes longer."""
        begun_s = time.monotonic()
        for look in looks(self._client.house, self.id):
            if look.job.status in wishes.ENDED:
                return look.job
            if timeout_s is not None and time.monotonic() > begun_s + timeout_s:
                break
        raise TimeoutError(f"{self.id} has not ended within {duration(timeout_s or 0.0)}")

    def logs(self, last: int = 1000) -> list[str]:
        """Return the last lines that its workers have printed, the oldest first."""
        return [line for _, _, line in self._client.house.last_lines(self.id, "", last)]

    def metrics(self) -> dict[str, list[float | None]]:
        """Return what its script has logged as columns, `step` first; None where a step has none."""
        steps = self._client.house.metrics(self.id)
        names = dict.fromkeys(name for numbers in steps.values() for name in numbers)
        columns: dict[str, list[float | None]] = {"step": [float(step) for step in steps]}
        for name in names:
            column = name if name != "step" else "step (logged)"
            columns[column] = [numbers.get(name) for numbers in steps.values()]
        return columns

    def checkpoints(self) -> list[Checkpoint]:
        """Return the states that it can be gone on from, the newest first."""
        return self._client.house.checkpoints(self.id)

    def cost(self, by: By = "cause") -> list[Spent]:
        """Return where its money went."""
        return self._client.history.money(self.id, by)

    def cancel(self) -> None:
        self._client.ask(wishes.cancel(self.view(), _asker()))

    def resume(self) -> None:
        """Go on with the job, which has failed or was cancelled, from its last step."""
        job = self.view()
        has_script = self._client.house.has_script(job.script_sha)
        self._client.ask(wishes.resume(job, has_script, _asker()))

    def resume_from(self, step: int) -> "Job":
        """Begin a new job like this one from a checkpoint, and return it."""
        job = self.view()
        has_script = self._client.house.has_script(job.script_sha)
        wish = wishes.branch(job, self.checkpoints(), step, has_script, _asker())
        assert isinstance(wish.event, JobBranched)
        self._client.ask(wish)
        return self._client.taken(wish.event.name)

    def change(self, budget_usd: wishes.Bound = "kept", deadline_s: wishes.Bound = "kept") -> None:
        """Give it another budget in dollars, or another deadline in seconds since 1970; None is none."""
        self._client.ask(wishes.change(self.view(), budget_usd, deadline_s, _asker()))


class Client:
    """A running manager, as its settings name it; raises `NotRunning` if there is none."""

    def __init__(self, config: Path | str | None = None, **settings: Any) -> None:
        """Read the settings as the command line does: `Client(manager__state_dir="/data/spot")`."""
        flags = {name.replace("__", "."): _typed(value) for name, value in settings.items()}
        path = None if config is None else Path(config).absolute()
        self.config: Config = load(path, os.environ, flags)
        # A submission reads the same settings again, with those of its job.
        self._path = path
        self._flags = flags | {"manager.state_dir": str(self.config.state_dir)}
        self.house = House.connect(self.config.state_dir)
        self.history = History.open(Places(self.config.state_dir))

    def view(self) -> View | None:
        """Return everything that the manager shows now; None before it has shown anything."""
        return self.house.view()

    def jobs(self) -> list[JobView]:
        return list(all_jobs(self.house))

    def job(self, name: str | None = None) -> Job:
        """Return a job by its id, or how that begins; the newest without a name."""
        return Job(self, find(self.house, name).id)

    def submit(
        self,
        script: Path | str,
        *argv: object,
        as_module: bool = False,
        with_: Sequence[str] = (),
        from_url: str | None = None,
        budget_usd: float | None = None,
        deadline_s: float | None = None,
        **options: Any,
    ) -> Job:
        """Hand a script in, and return its job once the manager has it.

        With `as_module` the script is the name of a module, as for `python -m`. `options` are settings
        of a job, such as `slots_max=8`. The deadline is in seconds since 1970.
        """
        own = {f"job.{name}": _typed(value) for name, value in options.items()}
        config = load(self._path, os.environ, self._flags, own)
        start = start_of(Path(script), as_module=as_module)
        words = tuple(map(str, argv))
        packed = pack(start, config, with_, words)
        spec = order_of(config, start.script, words, (budget_usd, deadline_s), from_url)
        spec = with_script(self.house, packed, spec)
        self.house.post(JobSubmitted(at_s=time.time(), spec=spec))
        return self.taken(spec.job)

    def taken(self, name: str) -> Job:
        """Return a job that was handed in, after a short wait for the manager to take it up."""
        until_s = time.monotonic() + TAKEN_S_MAX
        while time.monotonic() < until_s:
            if any(job.id == name for job in all_jobs(self.house)):
                break
            time.sleep(LOOK_S)
        return Job(self, name)

    def ask(self, wish: wishes.Wish) -> None:
        self.house.post(wish.event)

    def events(
        self, from_s: float = 0.0, job: str | None = None, kind: Kind | None = None
    ) -> list[Happening]:
        """Return what happened and why, the oldest first."""
        return self.history.events(from_s, job=job, kind=kind)

    def cost(self, by: By = "cause") -> list[Spent]:
        """Return where the money of all went."""
        return self.history.money(by=by)

    def footprint(self, last_s: float | None = None, points: int = POINTS) -> Footprint:
        """Return machines, throughput and cost over time, as the page draws them."""
        return footprint(self.history, Asked(last_s=last_s), points)


def _typed(value: object) -> str:
    """Return a value as a person types it, which for truth is not Python's way."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _asker() -> wishes.Asker:
    return wishes.Asker(by=BY, at_s=time.time())
