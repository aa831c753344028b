"""How many files and sockets a process may have open."""

import resource
from contextlib import suppress

FILES_WANTED = 65_536  # some systems allow a thousand million, and old programs walk all of them


def raise_file_limit() -> int:
    """Let this process and those it starts open as many files as they may; return how many.

    A shell gives 1,024 by default, which strangers could use up with connections alone. Only the
    system's administrator can raise the hard limit, so nothing is done about that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return FILES_WANTED if soft == resource.RLIM_INFINITY else soft
    with suppress(OSError, ValueError):  # a sandbox may refuse it
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
