"""Both ends of a connection in one process, which never waits: what system calls are left are what a message costs.

Between two marks, written to nowhere, a tracer finds the calls of so many round trips: sockets_calls.py ROUNDS.
"""

import os
import select
import socket
import subprocess
import sys

ROUNDS = int(sys.argv[1])
NOWHERE = os.open("/dev/null", os.O_WRONLY)


def pair():
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    return one, listener.accept()[0]


def rounds(phase, ends, around=lambda: None):
    one, other = ends
    # A first one, with which what changed is noticed.
    for count, mark in ((16, None), (ROUNDS, phase)):
        if mark:
            os.write(NOWHERE, b"begin " + phase.encode())
        for _ in range(count):
            for source, target in ((one, other), (other, one)):
                source.send(b"12345678")
                around()
                assert target.recv(8) == b"12345678"
        if mark:
            os.write(NOWHERE, b"end " + phase.encode())


def to_and_fro(poller, end):
    """As event loops do that put a connection into their set for each request."""

    def around():
        poller.register(end, select.EPOLLIN)
        poller.unregister(end)

    return around


def main():
    ends = pair()
    poller = select.epoll()
    changes = to_and_fro(poller, ends[0])
    rounds("alone", ends)
    rounds("alone, in and out of a set", ends, changes)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    rounds("beside a child", ends)
    os.close(write)
    os.waitpid(child, 0)
    rounds("after a child", ends)
    rounds("after a child, in and out of a set", ends, changes)
    subprocess.run(["true"], check=True)
    os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ), 0)
    rounds("after spawns", ends)
    rounds("after spawns, in and out of a set", ends, changes)
    os.set_inheritable(ends[0].fileno(), True)
    heir = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
    rounds("beside an heir", ends)
    os.kill(heir, 9)
    os.waitpid(heir, 0)
    rounds("after an heir", ends)
    rounds("after an heir, in and out of a set", ends, changes)
    print("done")


main()
