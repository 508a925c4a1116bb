"""A server that moves, and its client, which looks at every byte: sockets_migrate.py MODE HOST PORT ...

The client's connections differ in what they have done when the server moves: `pour` sends in both
directions at once, `turns` waits for each answer, `quiet` has been busy and says nothing until the
end, `young` has hardly said anything.
"""

import os
import random
import select
import socket
import subprocess
import sys
import threading
import time

from sockets_hosts import block, connect, listen, warm


def threads(host, port):
    """Echoes, a thread for each connection."""
    listener = listen(host, port)

    def echo(peer):
        while data := peer.recv(65536):
            peer.sendall(data)
        peer.close()

    while True:
        peer, _ = listener.accept()
        threading.Thread(target=echo, args=(peer,), daemon=True).start()


def epoll(host, port):
    """Echoes, all connections in one edge-triggered set."""
    listener = listen(host, port)
    listener.setblocking(False)
    events = select.epoll()
    events.register(listener, select.EPOLLIN)
    peers = {}
    while True:
        for fd, _ in events.poll():
            if fd == listener.fileno():
                peer, _ = listener.accept()
                peer.setblocking(False)
                peers[peer.fileno()] = [peer, b"", False]
                events.register(peer, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
                continue
            entry = peers[fd]
            peer = entry[0]
            while True:
                try:
                    if entry[1]:
                        entry[1] = entry[1][peer.send(entry[1]) :]
                    elif entry[2]:
                        del peers[fd]
                        peer.close()
                        break
                    else:
                        entry[1] = peer.recv(65536)
                        entry[2] = not entry[1]
                except BlockingIOError:
                    break


class Talk:
    """One connection; `moved` bytes came back, as they went."""

    def __init__(self, host, port, kind):
        self.kind, self.moved, self.sent, self.longest = kind, 0, 0, 0.0
        self.stop, self.problem, self.ready = False, None, threading.Event()
        self.peer = connect(host, port)
        self.peer.settimeout(PATIENCE)
        if kind == "quiet":
            warm(self.peer)
        if kind in ("quiet", "young"):
            self.turn(100)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        try:
            getattr(self, self.kind)()
            if self.kind != "pour":
                self.peer.shutdown(socket.SHUT_WR)
                assert self.peer.recv(1) == b"", "more than was sent"
            assert self.moved == self.sent, (self.moved, self.sent)
        except BaseException as error:
            self.problem = error

    def turn(self, size):
        self.peer.sendall(block(self.sent, size))
        self.sent += size
        while self.moved < self.sent:
            self.hear(self.sent - self.moved)

    def hear(self, most):
        before = time.monotonic()
        data = self.peer.recv(most)
        self.longest = max(self.longest, time.monotonic() - before)
        assert data == block(self.moved, len(data)), f"wrong bytes at {self.moved}"
        self.moved += len(data)
        return data

    def turns(self):
        chance = random.Random(5)
        while not self.stop:
            self.turn(chance.choice((1, 7, 100, 3000, 40000)))
            self.ready.set()
            time.sleep(0.005)

    def pour(self):
        chance = random.Random(6)

        def send():
            while not self.stop:
                if self.sent - self.moved > WINDOW:
                    time.sleep(0.002)
                    continue
                size = chance.choice((1, 7, 100, 5000, 60000))
                self.peer.sendall(block(self.sent, size))
                self.sent += size
            self.peer.shutdown(socket.SHUT_WR)

        writer = threading.Thread(target=send, daemon=True)
        writer.start()
        while self.hear(65536):
            self.ready.set()
        writer.join()

    def quiet(self):
        while not self.stop:
            time.sleep(0.05)
        for size in (1, 8, 20000, 300000):
            self.turn(size)

    young = quiet


# A move takes as long as it takes; beyond this the stream stands still.
PATIENCE = 120
# Bytes on their way: more than the kernel's buffers hold, so that some are unsent and some unread.
WINDOW = 1 << 20


def client(host, port, kinds, folder):
    """Says in `folder/progress` how many bytes came back on busy connections, until there is
    `folder/stop`, and in `folder/ended` how it went. While there is `folder/still` it opens no file."""
    try:
        said = talk_until_told(host, port, kinds, folder)
    except BaseException as error:
        said = repr(error)
    say(f"{folder}/ended", said)


def say(path, text):
    with open(f"{path}.new", "w") as file:
        print(text, file=file)
    os.rename(f"{path}.new", path)


def talk_until_told(host, port, kinds, folder):
    talks = [Talk(host, port, kind) for kind in kinds.split(",")]
    busy = [talk for talk in talks if talk.kind in ("pour", "turns")]
    for talk in busy:
        talk.ready.wait(PATIENCE)
    while not os.path.exists(f"{folder}/stop") and not any(talk.problem for talk in talks):
        if not os.path.exists(f"{folder}/still"):
            # The least of them, so that one which stands still is not hidden by another.
            say(f"{folder}/progress", min(talk.moved for talk in busy))
        time.sleep(0.1)
    for talk in talks:
        talk.stop = True
    for talk in talks:
        talk.thread.join(PATIENCE)
        if talk.thread.is_alive():
            talk.problem = talk.problem or TimeoutError("stands still")
    problems = [f"{talk.kind} after {talk.moved} bytes: {talk.problem!r}" for talk in talks if talk.problem]
    if problems:
        return "; ".join(problems)
    total = sum(talk.moved for talk in talks)
    longest = max(talk.longest for talk in talks)
    return f"{total} bytes of {len(talks)} connections came back, longest silence {longest:.1f} s"


def pair(host, port, kinds, folder):
    """Both, in two processes of which one is the other's child."""
    words = [sys.executable, __file__, "threads", host, str(port)]
    server = subprocess.Popen(words)
    for _ in range(600):
        try:
            connect(host, port).close()
            break
        except OSError:
            time.sleep(0.1)
    try:
        client(host, port, kinds, folder)
    finally:
        server.kill()


if __name__ == "__main__":
    mode, host, port = sys.argv[1:4]
    modes = {"threads": threads, "epoll": epoll, "client": client, "pair": pair}
    modes[mode](host, int(port), *sys.argv[4:])
