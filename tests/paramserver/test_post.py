"""Messages between processes: one that reads nothing holds up nobody else."""

import socket
import threading

import numpy as np

from agent.net.front import Front
from agent.net.handshake import Door
from agent.paramserver.live.post import Post
from agent.paramserver.messages import Beat, Push, Section

SECRET = "secret"
WAIT_S = 10.0


def test_a_process_that_reads_nothing_does_not_hold_up_messages_to_others():
    mine, theirs, over = Post("mine", SECRET), Post("theirs", SECRET), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    still = f"127.0.0.1:{listener.getsockname()[1]}"

    def hold(connection, hello):
        over.wait()
        connection.close()

    front = Front(listener, Door("still", lambda _: SECRET), hold)
    mine.book |= {"theirs": theirs.address, "still": still}
    rows = Section("rows", np.zeros(1, np.int64), np.zeros((1, 1 << 23)))

    def say():
        mine.send("still", Push(partition=0, clock=0, sections=[rows]))
        mine.send("theirs", Beat())
        mine.flush()

    sender = threading.Thread(target=say, daemon=True)
    sender.start()
    try:
        assert theirs.inbox.get(timeout=WAIT_S) == ("mine", Beat())
        mine.drop("still")
        assert "still" not in mine.book
    finally:
        over.set()
        mine.close()
        theirs.close()
        front.close()
