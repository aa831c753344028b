"""A worker that sends one block after the other to its peer until it is killed: pushing_peer.py NAME PEER ADDRESS KIND."""

import sys
import threading

from agent.transport.tcp import Tcp
from agent.transport.transport import Slot

name, peer, address, kind = sys.argv[1:]
changed = threading.Condition()
tcp = Tcp(name, "a secret", changed, lambda _: None, host="127.0.0.1")
tcp.shares = kind != "sockets"
if kind == "nixl":
    tcp.reach()
data = memoryview(bytearray(b"x" * (3 << 20)))
tcp.meet(peer, address.encode())
step = 0
while True:
    ticket = tcp.push(peer, Slot(0, step, "block", 0), [data])
    with changed:
        if not changed.wait_for(lambda ticket=ticket: ticket.done or ticket.failed, 60):
            sys.exit("it hangs")
    if ticket.failed:
        sys.exit("the other side is gone")
    step += 1
