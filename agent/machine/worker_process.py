"""One worker: a process that runs a person's script once, its session being one of many.

    python -m agent.machine.worker_process --host 127.0.0.1 < order.json

On a machine it is a fork of `agent.machine.fork_server`. Slow imports are done before the order
comes, so a process that waits for its order is warm. The process ends with the script; a worker
that is no longer wanted ends at once.
"""

import argparse
import logging
import multiprocessing
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Literal, NoReturn

import msgspec
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from agent import session
from agent.boot.node import SOCKET_BYTES_MAX
from agent.errors import CannotRecord, Misuse, NotFinite, ParcelError, WireError
from agent.machine.console import LeaderOnly, Lines, Stream
from agent.machine.crashes import Record, disk
from agent.machine.scratch import scratch
from agent.machine.script_end import PastPython, ended_like_a_process
from agent.messages import FailureKind, JobOrder, WorkerOrder
from agent.output import missing_file
from agent.output.files import Bounds
from agent.output.folder import Output
from agent.output.strays import Strays
from agent.pipeline.tracing.recording import compiled
from agent.protocol import Ended, Failed, Unable
from agent.protocol import Lines as LinesMessage
from agent.sharded import refusals
from agent.source import parcel
from agent.source.tracebacks import traceback_of
from agent.store.memory import keep_memory
from agent.tensors import device
from agent.worker.group import Group
from agent.world import Left

GOODBYE_S = 5.0
DETAIL_CHARS_MAX = 60_000
LATE = (
    "a worker that joins in a later epoch, or in a later loop, runs the code at its start, or between the loops, without "
    "the steps before it: what that code needs of them belongs into session.state, or has a value before the loop"
)
UNSET = (
    "{1}, and this worker came in a later step: if an earlier step or epoch sets {0}, it belongs into "
    'session.state["{0}"], or is set before the loop'
)
ASTRAY = "the job went on without this worker, and its script ended in what was left of the step"
TAKEN = (
    "a worker has another module of that name in use, which the script would get: rename this one"
)
# Said after the words of torch, which name how much was asked for.
FULL = (
    "The device has no memory left for this step. Beside weights and optimizer it holds the gradients of a microbatch and "
    "{:g} times their size in sums: take smaller microbatches or machines with larger devices; deterministic=False holds "
    'one sum, and exchange="bfloat16" halves each'
)
# Torch says only that its limit is hit.
COMPILED = (
    "torch.compile has compiled this code {} times, each time for another shape or number. A job compiles each by itself, "
    "because all workers have to round alike: give torch.compile dynamic=True, pad to a few lengths, or leave it out"
)

RANKS = (
    "torchrun would have set this, and the workers of a job have no ranks: leave out init_process_group, "
    "DistributedDataParallel and DistributedSampler, and ask session.leader instead of rank 0"
)
OF_RANKS = re.compile(
    r"\b(LOCAL_)?RANK\b|\bWORLD_SIZE\b|\bMASTER_(ADDR|PORT)\b|process group has not been initialized"
)
LISTENER = "/listener-12345678"  # as `multiprocessing` calls a socket
END = os._exit

Outcome = Literal["ended", "failed"]


def warm_up() -> None:
    """Train a tiny model, so that torch has imported and allocated its first-use parts.

    None of it may use the threads of OpenMP, because a process that is forked after they have
    started waits for them in vain. Nor is anything trained where torch knows an accelerator: its
    first backward starts threads for devices, and an optimizer asks for them, after which no
    fork can use one.
    """
    keep_memory()
    if torch.accelerator.current_accelerator() is not None:
        return
    model = torch.nn.PReLU(4)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model(torch.zeros(2, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    # A recording asks for the table of what may be overridden, which takes long to make.
    torch.overrides.is_tensor_method_or_property(torch.Tensor.add)


def complain(worker: str, why: str) -> None:
    with suppress(OSError):  # on a full disk
        print(f"{worker}: {why}", file=sys.__stderr__, flush=True)


def keep_own_words_apart() -> None:
    """Send the agent's own log to this machine, because the script's errors are the person's."""
    own = logging.getLogger("agent")
    own.addHandler(logging.StreamHandler(sys.__stderr__))
    own.propagate = False


def run(order: WorkerOrder, host: str, say: Callable[[str], None] | None = None) -> Outcome:
    """Run the job's script in this process, once only, as it may leave anything behind.

    `say` takes the reason before the process ends without the end of its script.
    """
    keep_own_words_apart()
    over, goodbye = threading.Event(), threading.Event()

    def ended(why: str) -> None:
        goodbye.set()
        if not over.is_set():
            complain(order.worker, why) if say is None else say(why)
            END(1)

    group = Group(order, host, ended)
    job, payload = group.start()
    lines = Lines(lambda batch: group.link.send(LinesMessage(lines=batch)))
    failure = _perform(order, job, payload, group, lines)
    said = failure.why if isinstance(failure, Unable) else failure.detail if failure else ""
    for line in said.splitlines():
        lines.add(line)  # where a person looks for it, as by hand
    lines.close()
    over.set()
    group.link.send(Ended() if failure is None else failure)
    goodbye.wait(GOODBYE_S)
    group.close()
    return "ended" if failure is None else "failed"


def _perform(
    order: WorkerOrder, job: JobOrder, payload: bytes, group: Group, lines: Lines
) -> Failed | Unable | None:
    if job.script_sha and group.code != job.script_sha:
        return Failed(kind="setup", detail=f"{job.script}: what arrived is not what was submitted")
    try:
        came = parcel.read(payload, Path(job.script).name)
    except ParcelError as error:
        return Failed(kind="setup", detail=f"{job.script}: {error}")
    if taken := parcel.taken_names(came):
        return Failed(kind="setup", detail=f"{taken[0]}: {TAKEN}")
    # On the machine's own disk, because there the folder of a killed worker goes with the machine,
    # or with the next worker.
    with ExitStack() as held:
        try:
            folder = held.enter_context(scratch("worker-", disk()))
            script = parcel.unpack(came, folder)
            record = held.enter_context(closing(Record(order, folder)))
            # Apart from the script's files, of which a script may copy all.
            _keep_sockets_in(held.enter_context(scratch("sockets-", disk())))
        except OSError as error:
            why = missing_file.not_unpacked(error, disk(), order.machine_id)
            return Unable(cause="machine", why=why)
        group.output = _output_in(folder, came, job, group, lines)
        group.link.beating = lambda anew: group.output.tell_numbers(anew=anew)
        session.join(group)
        device.take(group.slot)
        out = LeaderOnly(lines, lambda: group.prints)
        streams = Stream(_both(record.add, out.add)), Stream(_both(record.add, lines.add))
        with parcel.at_home(folder, script), _as_script(script.path, job.argv, streams):
            failure = _execute(script, group, streams[1])
        group.output.finish(_step(), leads=bool(group.leads))
        # Output of a script before it failed may help to see why.
        out.settle(passes=failure is not None or bool(group.prints))
        if failure is None or isinstance(failure, Unable):
            return failure
        typed_in = job.script.removesuffix(came.script) if job.script.endswith(came.script) else ""
        detail = failure.detail.replace(f"{folder}{os.sep}", typed_in)[-DETAIL_CHARS_MAX:]
        return Failed(
            kind=failure.kind,
            detail=detail.encode(errors="backslashreplace").decode(),
            step=next((each.replica.inside for each in session.made()), None),
        )


def _keep_sockets_in(place: Path) -> None:
    """Have `multiprocessing` make its sockets there, if the system takes so long a path.

    Processes that fetch data are killed with the worker, and so remove none of theirs.
    """
    if len(os.fsencode(place)) + len(LISTENER) <= SOCKET_BYTES_MAX:
        multiprocessing.current_process()._config["tempdir"] = str(place)  # type: ignore[attr-defined]


def _both(first: Callable[[str], None], second: Callable[[str], None]) -> Callable[[str], None]:
    def add(line: str) -> None:
        first(line)
        second(line)

    return add


def _output_in(
    folder: Path, came: parcel.Parcel, job: JobOrder, group: Group, lines: Lines
) -> Output:
    """Make `session.output` beside the script's files, under a name that none of them has."""
    name = "output"
    while any(file.partition("/")[0] == name for file in came.files):
        name += "_"
    return Output(
        folder / name,
        group.link.send,
        lambda: group.generation,
        aided=group.link.stuck.aided,
        bounds=Bounds(files=job.output_files, total_bytes=job.output_bytes),
        strays=Strays(folder, folder / name),
        say=lines.add,
    )


def _step() -> int:
    """Return the step that the script's last words belong to, after those of its loop."""
    return next((each.replica.turn + 1 for each in session.made()), 0)


def _comes_in() -> bool:
    return any(each.replica.comes_in for each in session.made())


def _execute(script: parcel.Unpacked, group: Group, errors: Stream) -> Failed | Unable | None:
    failure = _play(script, group, errors)
    if group.astray and not (failure is not None and _comes_in()):
        # The script ran without gradients or without the whole model, and cannot be expected to
        # survive that.
        said = failure.detail if isinstance(failure, Failed) else ""
        raise WireError(f"{ASTRAY}: {said}" if said else ASTRAY)
    return failure


def _play(script: parcel.Unpacked, group: Group, errors: Stream) -> Failed | Unable | None:
    try:
        try:
            _run(script)
        except SystemExit as end:
            if end.code not in (None, 0):
                return _of_exit(end, errors)
        except Left:
            session.made()[0].leave()
        if not session.made() and group.node is None:
            session.check_process()
            return Failed(
                kind="no_session",
                detail=f"{script.path} came to its end without a session: make one with Session(model, optimizer, "
                "...) and loop over session.steps(...)",
            )
        if not group.astray and group.node is None:
            session.made()[0].close()
    except WireError:
        raise  # not the script's fault: this worker is simply lost
    except NotFinite as error:
        return Failed(kind="nan", detail=str(error))
    except (Misuse, CannotRecord) as error:
        kind: FailureKind = "refused" if isinstance(error, Misuse) else "unsupported"
        return Failed(kind=kind, detail=traceback_of(error))
    except BaseException as error:
        return _of_script(error, group)
    return None


def _run(script: parcel.Unpacked) -> None:
    """Run the script; a process that it forks ends like any other process, not as a worker."""
    worker, code = os.getpid(), None
    try:
        with ended_like_a_process(), _exits_heard(worker):
            script.run()
    except BaseException as error:
        if os.getpid() == worker:
            raise
        code = error.code if isinstance(error, SystemExit) else 1
        if not isinstance(error, SystemExit):
            traceback.print_exc()
    finally:
        if os.getpid() != worker:
            END(code if isinstance(code, int) else code is not None)


@contextmanager
def _exits_heard(worker: int) -> Iterator[None]:
    """Turn the script's `os._exit` into `sys.exit`, because a silent end looks like a kill.

    The worker of a killed process is started again. Elsewhere, in a thread or in a forked process,
    the exception would not be caught, so there the process ends at once.
    """

    def end(status: int) -> NoReturn:
        if os.getpid() == worker and threading.get_ident() == script:
            raise PastPython(status)
        END(status)

    script = threading.get_ident()
    os._exit = end
    try:
        yield
    finally:
        os._exit = END


def _of_exit(end: SystemExit, errors: Stream) -> Failed:
    """Return the failure of an exit as Python treats it.

    A code that is no number goes to standard error, and counts as 1.
    """
    code = end.code
    if not isinstance(code, int):
        errors.write(f"{code}\n")
        code = 1
    errors.finish()
    said = f": {errors.last}" if errors.last else ""
    return Failed(kind="exit", detail=f"the script ended itself with {code}{said}")


def _of_script(error: BaseException, group: Group) -> Failed | Unable:
    if group.lacks_files and (why := missing_file.lacked(error)):
        return Unable(cause="exited", why=why)
    said = traceback_of(error)
    if cause := _cause_in_script(error):
        return Failed(kind="refused", detail=f"{said}\n{cause}")
    line = missing_file.hint(error, group.output.in_use)
    if line := line or missing_file.no_room(error, disk(), group.machine):
        said = f"{said}\n{line}"
    if isinstance(error, torch.OutOfMemoryError):
        held = next((each.replica.sums_held for each in session.made()), 1.0)
        said = f"{said}\n{FULL.format(held)}"
    return Failed(kind="exception", detail=said)


def _cause_in_script(error: BaseException) -> str | None:
    """Return what the script has to change if it is to run as a job, where the error shows that."""
    made = session.made()
    apart = any(each.replica.holdings.here is not None for each in made)
    if apart and (cause := refusals.cause_of(error)):
        return cause
    if any(each.passes_over for each in made):
        return LATE
    if isinstance(error, NameError) and any(each.replica.loaded for each in made):
        # One of a function's variable has no `name`.
        name = next(iter(re.findall(r"'(\w+)'", str(error))), "name")
        return UNSET.format(name, error)
    if _lacks_ranks(error):
        return RANKS
    if isinstance(error, FailOnRecompileLimitHit):
        return COMPILED.format(compiled.SHAPES_MAX)
    return None


def _lacks_ranks(error: BaseException) -> bool:
    """Return whether the environment or torch lacks what torchrun sets; no dict of the script's."""
    *_, (raising, _) = traceback.walk_tb(error.__traceback__)
    module = str(raising.f_globals.get("__name__"))
    asked = module == "os" or module.startswith("torch.distributed.")
    return asked and OF_RANKS.search(str(error)) is not None


@contextmanager
def _as_script(path: Path, argv: tuple[str, ...], streams: tuple[Stream, Stream]) -> Iterator[None]:
    """Make the process look to the script as if it had been started by hand."""
    before = sys.argv, sys.stdout, sys.stderr
    sys.argv = [str(path), *argv]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.argv, sys.stdout, sys.stderr = before
        for stream in streams:
            stream.finish()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agent.machine.worker_process", description=__doc__
    )
    parser.add_argument("--host", default="127.0.0.1", help="where other workers can reach us")
    options = parser.parse_args()
    warm_up()
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerOrder)
    run(order, options.host)
    return 0


if __name__ == "__main__":
    sys.exit(main())
