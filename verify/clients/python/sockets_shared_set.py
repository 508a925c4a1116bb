"""Parent and child of a fork wait on one set, in turns and at once: who waits hears.

sockets_shared_set.py edge|level CONNECTIONS ROUNDS SEED. Each byte is read by one of those who wait when it
is sent, as the kernel has it; who heard is away until he is told to wait again."""

import os
import random
import select
import socket
import sys

PATIENCE = 20


def wait_when_told(name, events, peers, hears, tells):
    """Waits at each word until a byte was read, and tells of which connection it was."""
    while os.read(hears, 1):
        heard = None
        while heard is None:
            for fd, _ in events.poll():
                try:
                    heard = peers[fd].recv(1)
                except BlockingIOError:
                    continue  # The other one was told, too, and came first.
                os.write(tells, b"%s%06d%s" % (name, fd, heard))
    os._exit(0)


def main():
    mode = {"edge": select.EPOLLET, "level": 0}[sys.argv[1]]
    count, rounds, seed = (int(word) for word in sys.argv[2:])
    chance = random.Random(seed)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    told, tells = os.pipe()
    hears, asks = zip(os.pipe(), os.pipe())
    # Parent and child are processes of their own: this one has the other ends.
    parent = os.fork()
    if parent == 0:
        for fd in asks:
            os.close(fd)
        events, peers = select.epoll(), {}
        for _ in range(count):
            peer = listener.accept()[0]
            peer.setblocking(False)
            peers[peer.fileno()] = peer
            events.register(peer, select.EPOLLIN | mode)
        os.write(tells, b"ready!!!")
        child = os.fork()
        name, own = (b"p", hears[0]) if child else (b"c", hears[1])
        wait_when_told(name, events, peers, own, tells)
    streams = [socket.create_connection(listener.getsockname()) for _ in range(count)]
    assert os.read(told, 8) == b"ready!!!"
    for stream in streams:
        os.close(os.dup(stream.fileno()))  # What has two numbers asks at once.
    waiting = []
    for turn in range(rounds):
        away = [who for who in (b"p", b"c") if who not in waiting]
        # In turn in both orders, one alone and both at once.
        chance.shuffle(away)
        for who in away[: chance.randint(0 if waiting else 1, len(away))]:
            os.write(asks[b"pc".index(who)], b"w")
            waiting.append(who)
            select.select([], [], [], chance.choice((0, 0.001, 0.01, 0.03)))
        byte = bytes([97 + turn % 26])
        chance.choice(streams).send(byte)
        ready, _, _ = select.select([told], [], [], PATIENCE)
        assert ready, f"seed {seed}, turn {turn}: nobody of {waiting} heard"
        said = os.read(told, 8)
        assert said[7:] == byte and said[:1] in waiting, (seed, turn, waiting, said)
        waiting.remove(said[:1])
    assert not select.select([told], [], [], 0.2)[0], "heard twice"
    for fd in asks:
        os.close(fd)
    for who in list(waiting):
        streams[0].send(b"!")
        os.read(told, 8)
    assert os.waitpid(parent, 0)[1] == 0
    print("heard by who waits")


main()
