"""The process that forks the workers of a machine: it has imported everything that they need.

    python -m agent.machine.fork_server PARENT LOG < requests > answers

Requests and answers are those of `agent.machine.workers`, one on each line. What workers write to
their own descriptors 1 and 2 comes through a pipe into LOG, which is bounded.

A fork takes one thread along, so this process has only one, and it touches no accelerator. Ends of
workers are heard by descriptors of processes, not by signals, so there is nothing that a signal
could interrupt, and nothing that a worker would inherit.
"""

import gc
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from agent.errors import AgentError
from agent.machine.bounded_file import BoundedFile
from agent.machine.parent_death import kill_family, name, tie
from agent.machine.workers import Answer, Over, Request, Start, Started, ended_by

READ_BYTES = 1 << 16
WORDS_BYTES_MAX = 4_000  # a pipe takes as much at once, whoever reads
CHARS_MAX = 500
IN, OUT = 0, 1
FIRST_TO_GO = b"1000"  # out of memory: of all processes, the kernel takes a script first


class Words(msgspec.Struct):
    """The last words of a worker."""

    finished: bool
    why: str


class Worker(msgspec.Struct, frozen=True):
    name: str
    pid: int
    ended: int  # is readable when the process has ended
    words: int  # where its last words are read


class Server:
    """Forks workers, and reads what they write and how they end."""

    def __init__(self, log: Path) -> None:
        self._log = BoundedFile(log)
        self._pid = os.getpid()
        self._written, self._write = os.pipe()
        self._poll = select.poll()
        self._workers: dict[int, Worker] = {}  # by the descriptor of its process
        self._begun = b""

    def serve(self) -> None:
        """Serve until there is nobody who could ask any more; then end all workers."""
        for readable in (IN, self._written):
            self._poll.register(readable, select.POLLIN)
        while True:
            for readable, _ in self._poll.poll():
                if readable == self._written:
                    self._log.write(os.read(self._written, READ_BYTES))
                elif readable != IN:
                    self._bury(self._workers.pop(readable))
                elif not self._obey():
                    self._end_all()
                    return

    def _obey(self) -> bool:
        """Do what is asked; return whether more may be asked."""
        read = os.read(IN, READ_BYTES)
        *lines, self._begun = (self._begun + read).split(b"\n")
        for line in lines:
            request = msgspec.json.decode(line, type=Request)
            if isinstance(request, Start):
                self._fork(request)
            else:
                for worker in self._workers.values():
                    if worker.name == request.worker:
                        kill_family(worker.pid)
        return bool(read)

    def _fork(self, start: Start) -> None:
        words, speak = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(words)
            os.close(speak)
            why = f"it could not be started: {error.strerror or error}"
            _answer(Over(start.order.worker, 0, finished=False, why=why))
            return
        if pid == 0:
            self._live(start, speak)
        os.close(speak)
        os.set_blocking(words, False)
        worker = Worker(start.order.worker, pid, os.pidfd_open(pid), words)
        self._workers[worker.ended] = worker
        self._poll.register(worker.ended, select.POLLIN)
        _answer(Started(worker.name, pid))

    def _live(self, start: Start, speak: int) -> NoReturn:
        """Be a worker from now on."""
        from agent.machine import worker_process

        words = Words(finished=False, why="")

        def part() -> None:
            with suppress(OSError):  # the script may have closed what it did not open
                os.write(speak, msgspec.json.encode(words))

        def say(why: str) -> None:
            worker_process.complain(start.order.worker, why)
            words.why = why[:CHARS_MAX]
            part()

        try:
            os.setsid()
            tie(self._pid)
            name(f"worker {start.order.worker}")
            self._let_go()
            worker_process.run(start.order, start.host, say)
            words.finished = True
            part()
        except AgentError as error:
            say(str(error) or type(error).__name__)
        except BaseException as error:
            with suppress(OSError):
                traceback.print_exc(file=sys.__stderr__)
            say(repr(error))
        finally:
            worker_process.END(0 if words.finished else 1)

    def _let_go(self) -> None:
        """Give up what belongs to the server, and take what each process has for itself."""
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, IN)
        os.dup2(self._write, 1)
        os.dup2(self._write, 2)
        for worker in self._workers.values():
            os.close(worker.ended)
            os.close(worker.words)
        for each in (nothing, self._written, self._write):
            os.close(each)
        self._log.close()
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_bytes(FIRST_TO_GO)
        # Python's own stream of random numbers does this by itself.
        np.random.seed()

    def _bury(self, worker: Worker) -> None:
        self._poll.unregister(worker.ended)
        # As long as it was not waited for, nobody else has its id.
        kill_family(worker.pid)
        _, status = os.waitpid(worker.pid, 0)
        words = Words(finished=False, why="")
        with suppress(OSError, ValueError):
            words = msgspec.json.decode(os.read(worker.words, WORDS_BYTES_MAX), type=Words)
        os.close(worker.ended)
        os.close(worker.words)
        why = words.why or ended_by(os.waitstatus_to_exitcode(status))
        why = "" if words.finished else why
        _answer(Over(worker.name, worker.pid, finished=words.finished, why=why))

    def _end_all(self) -> None:
        for worker in self._workers.values():
            kill_family(worker.pid)


def _answer(answer: Answer) -> None:
    data = memoryview(msgspec.json.encode(answer) + b"\n")
    with suppress(BrokenPipeError):
        while data:
            data = data[os.write(OUT, data) :]


def main() -> None:
    tie(int(sys.argv[1]))
    name("workers")
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Imports make a million objects and hardly any garbage: looking for it takes a quarter of them.
    gc.disable()
    from agent.machine import worker_process

    worker_process.warm_up()
    # Objects that are never collected leave their pages in common with all workers.
    gc.collect()
    gc.freeze()
    gc.enable()
    Server(Path(sys.argv[2])).serve()


if __name__ == "__main__":
    main()
