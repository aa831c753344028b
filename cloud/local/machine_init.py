"""The init process of one machine: `python -m cloud.local.machine_init PARENT_PID COMMAND ...`.

It runs the command (on machines of the local cloud, the first-boot script) and reaps orphaned
processes. It is also the machine's power switch: on SIGTERM the command is asked to end, then every
process is killed; when the command ends or the parent process is gone, the machine is switched off
at once. No process that was started on the machine outlives it.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

from cloud.local import processes

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SHUTDOWN_S = 2.0
WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP}

_libc = ctypes.CDLL(None)


def main() -> int:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != parent_pid:
        return 1
    try:
        boot = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_as_child)  # noqa: PLW1509
    except OSError as error:
        print(f"{command[0]} cannot run: {error}", file=sys.stderr)  # noqa: T201
        return 1
    status = _until_over(boot.pid)
    _switch_off()
    return status


def _as_child() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _until_over(boot_pid: int) -> int:
    """Reap until the command ends, its shutdown time is over, or the parent is gone.

    Return the exit status of the command, or 1 if it has not ended.
    """
    deadline_s = float("inf")
    while (left_s := deadline_s - time.monotonic()) > 0:
        seen = signal.sigtimedwait(WATCHED, min(left_s, 60.0))
        if (status := _reap(boot_pid)) is not None:
            return status
        if seen and seen.si_signo == signal.SIGHUP:
            return 1
        if seen and seen.si_signo == signal.SIGTERM and deadline_s == float("inf"):
            os.kill(boot_pid, signal.SIGTERM)
            deadline_s = time.monotonic() + SHUTDOWN_S
    return 1


def _reap(boot_pid: int) -> int | None:
    """Reap all ended processes; return the command's exit status if it was among them."""
    status = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == boot_pid:
            status = os.waitstatus_to_exitcode(code) & 0xFF


def _switch_off() -> None:
    processes.kill({os.environ[processes.MARKER]: os.getpid()})


if __name__ == "__main__":
    sys.exit(main())
