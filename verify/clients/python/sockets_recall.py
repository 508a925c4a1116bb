"""Conversations whose connection is called back to the kernel in their midst. Every byte is looked at.

    sockets_recall.py serve WAY PORT [ADDRESS]     WAY: blocking, level, edge
    sockets_recall.py many HOST PORT SECONDS SEED  the same over 120 connections, some at a time, by a set
    sockets_recall.py aside PORT                   for one connection: a child has it, too, and its
                                                   parent leaves for another network (root may)
    sockets_recall.py talk HOST PORT SECONDS SEED  says its number, waits for a line or for
                                                   there being none, then says how it ended
    sockets_recall.py apart HOST PORT SECONDS [LARGE]  by two threads, one of which always sleeps in recv,
                                                   a byte at a time; then as many large pieces
    sockets_recall.py hands_on HOST PORT           after some words with one that says, told by a line, it sends the
                                                   connection to a child in a message, which takes it after another
    sockets_recall.py says HOST PORT               says its number, and waits as talk does; then says the rest
    sockets_recall.py crowd HOST PORT COUNT        as many connections; says its number, waits as talk does,
                                                   uses each once more, and says how that ended
    sockets_recall.py hold                         says its number; then it has the sockets of the processes
                                                   of the next line, too
    sockets_recall.py cut HOST PORT PLAIN          says its number, and waits as talk does; then the kernel
                                                   ends its one connection, and one to port PLAIN stays
"""

import ctypes
import fcntl
import os
import random
import select
import socket
import struct
import sys
import termios
import threading
import time


def block(place, size):
    begin = place % 251
    return (bytes(range(251)) * (size // 251 + 2))[begin : begin + size]


def unread(peer):
    return struct.unpack("i", fcntl.ioctl(peer, termios.FIONREAD, b"\0" * 4))[0]


def echo(peer):
    with peer:
        while data := peer.recv(random.randrange(1, 30000)):
            peer.sendall(data)


def serve_blocking(listener):
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=echo, args=(peer,), daemon=True).start()


def serve_by_set(listener, edge):
    events = select.epoll()
    events.register(listener, select.EPOLLIN)
    peers, held = {}, {}
    how = select.EPOLLET if edge else 0
    while True:
        for number, _ in events.poll():
            if number == listener.fileno():
                peer, _ = listener.accept()
                peer.setblocking(False)
                peers[peer.fileno()], held[peer.fileno()] = peer, b""
                both = select.EPOLLIN | (select.EPOLLOUT if edge else 0)
                events.register(peer, both | how)
                continue
            peer, ended = peers[number], False
            while True:
                moved = False
                if len(held[number]) < 60000:
                    try:
                        data = peer.recv(20000)
                        ended |= not data
                        held[number] += data
                        moved |= bool(data)
                    except BlockingIOError:
                        pass
                if held[number]:
                    try:
                        sent = peer.send(held[number])
                        held[number] = held[number][sent:]
                        moved |= sent > 0
                    except BlockingIOError:
                        pass
                if not moved or not edge:
                    break
            if ended and not held[number]:
                events.unregister(peer)
                peer.close()
                del peers[number], held[number]
            elif not edge:
                wanted = select.EPOLLOUT if held[number] else 0
                events.modify(peer, wanted | (0 if ended else select.EPOLLIN))


def serve(way, port, address="127.0.0.1"):
    listener = socket.create_server((address, int(port)))
    if way == "blocking":
        serve_blocking(listener)
    else:
        serve_by_set(listener, way == "edge")


def serve_aside(port):
    listener = socket.create_server(("127.0.0.1", int(port)))
    print("listens", flush=True)
    peer, _ = listener.accept()
    if os.fork() == 0:
        echo(peer)
        os._exit(0)
    CLONE_NEWNET = 0x40000000
    print("aside", ctypes.CDLL(None).unshare(CLONE_NEWNET), flush=True)
    time.sleep(4)


def hold():
    print("client", os.getpid(), flush=True)
    PIDFD_GETFD = 438
    for process in sys.stdin.readline().split():
        handle, folder = os.pidfd_open(int(process)), f"/proc/{process}/fd/"
        for number in os.listdir(folder):
            if os.readlink(folder + number).startswith("socket:"):
                copy = ctypes.CDLL(None).syscall(PIDFD_GETFD, handle, int(number), 0)
                assert copy > 0
    print("holds", flush=True)
    time.sleep(60)


def cut(host, port, plain):
    peers = [socket.create_connection((host, int(at))) for at in (port, plain)]
    peers[0].sendall(b"word")
    assert peers[0].recv(4, socket.MSG_WAITALL) == b"word"
    print("client", os.getpid(), flush=True)
    sys.stdin.readline()
    # To no family: the kernel ends the connection, and the library does not hear of it.
    CONNECT = 42 if os.uname().machine == "x86_64" else 203
    assert ctypes.CDLL(None).syscall(CONNECT, peers[0].fileno(), bytes(16), 16) == 0
    print("cut", flush=True)
    time.sleep(20)


def crowd(host, port, count):
    peers = [socket.create_connection((host, int(port))) for _ in range(int(count))]

    def all_talk(word):
        for peer in peers:
            peer.sendall(word)
        return all(peer.recv(len(word), socket.MSG_WAITALL) == word for peer in peers)

    begun = all(all_talk(b"some words") for _ in range(3))
    print("client", os.getpid(), flush=True)
    sys.stdin.readline()
    print("well" if begun and all_talk(b"more words") else "not well", flush=True)


def talk(host, port, seconds, seed):
    chance = random.Random(int(seed))
    peer = socket.create_connection((host, int(port)))
    print("client", os.getpid(), flush=True)
    sys.stdin.readline()
    begun, place, count, longest = time.monotonic(), 0, 0, 0.0
    until = begun + float(seconds)
    while (now := time.monotonic()) < until:
        size = chance.choice([1, 60, 900, 4000, 20000, 90000])
        data = block(place, size)
        sender = threading.Thread(target=peer.sendall, args=(data,))
        sender.start()
        got = b""
        while len(got) < size:
            piece = peer.recv(chance.randrange(1, 70000))
            if not piece:
                print("end after", place, flush=True)
                return
            got += piece
        sender.join()
        assert got == data, place
        assert unread(peer) == 0, place
        place, count = place + size, count + 1
        longest = max(longest, time.monotonic() - now)
        if chance.randrange(20) == 0:
            time.sleep(chance.random() / 50)
    peer.shutdown(socket.SHUT_WR)
    assert peer.recv(1) == b""
    print(f"well after {count} rounds, the longest of {longest:.2f} s", flush=True)


def apart(host, port, seconds, large=0):
    peer = socket.create_connection((host, int(port)))
    news, heard, room = threading.Condition(), 0, 3

    def hear():
        nonlocal heard
        while got := peer.recv(room):
            with news:
                heard += len(got)
                news.notify()

    said = 0

    def say(word):
        nonlocal said
        said += len(word)
        peer.sendall(word)
        with news:
            assert news.wait_for(lambda: heard == said, 30), (heard, said)
        # The other thread sleeps again.
        time.sleep(0.005)

    threading.Thread(target=hear).start()
    for _ in range(20):
        say(b"w")
    print("client", os.getpid(), flush=True)
    sys.stdin.readline()
    # Two calls of the other thread: from here on every second call is again one of this, but the even ones.
    say(b"words")
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        say(b"w")
    room = 1 << 16
    for _ in range(int(large)):
        say(bytes(100000))
    peer.shutdown(socket.SHUT_WR)
    print("well", flush=True)


SOME, REST = block(0, 240), block(240, 5000)


def hands_on(host, port):
    listener = socket.create_server((host, int(port)))
    print("listens", flush=True)
    peer, _ = listener.accept()
    for _ in range(20):
        peer.sendall(peer.recv(1))
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    told, tells = os.pipe()
    if os.fork() == 0:
        peer.close()
        os.read(told, 1)
        _, numbers, _, _ = socket.recv_fds(theirs, 10, 1)
        taken = socket.socket(fileno=numbers[0])
        got = b""
        while data := taken.recv(4096):
            got += data
        well = got == SOME + REST
        print("well" if well else f"not well: {len(got)} bytes, {got[:300]}", flush=True)
        os._exit(0)
    sys.stdin.readline()
    socket.send_fds(ours, [b"x"], [peer.fileno()])
    print("handed", flush=True)
    sys.stdin.readline()
    os.write(tells, b"x")
    os.wait()


def says(host, port):
    peer = socket.create_connection((host, int(port)))
    for _ in range(20):
        peer.sendall(b"w")
        assert peer.recv(1) == b"w"
    for at in range(0, len(SOME), 8):
        peer.sendall(SOME[at : at + 8])
    print("client", os.getpid(), flush=True)
    sys.stdin.readline()
    peer.sendall(REST)
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)


def many(host, port, seconds, seed):
    chance = random.Random(int(seed))
    peers = [socket.create_connection((host, int(port))) for _ in range(120)]
    print("client", os.getpid(), flush=True)
    sys.stdin.readline()
    events, by_number, places = select.epoll(), {}, {}
    for peer in peers:
        peer.setblocking(False)
        events.register(peer, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        by_number[peer.fileno()], places[peer.fileno()] = peer, 0
    until, count, longest = time.monotonic() + float(seconds), 0, 0.0
    while (now := time.monotonic()) < until:
        left = {}
        for peer in chance.sample(peers, chance.choice([1, 3, 30, 100])):
            number, size = peer.fileno(), chance.choice([1, 60, 900])
            left[number] = block(places[number], size)
            places[number] += size
            assert peer.send(left[number]) == size
        while left:
            told = events.poll(30)
            if not told:
                print("stuck after", count, "with", len(left), flush=True)
                return
            for number, _ in told:
                try:
                    while number in left and (got := by_number[number].recv(2000)):
                        assert left[number].startswith(got), count
                        left[number] = left[number][len(got) :]
                        if not left[number]:
                            del left[number]
                            count += 1
                except BlockingIOError:
                    pass
        longest = max(longest, time.monotonic() - now)
    for peer in peers:
        peer.setblocking(True)
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(1) == b""
    print(f"well after {count} rounds, the longest of {longest:.2f} s", flush=True)


if __name__ == "__main__":
    {"serve": serve, "aside": serve_aside, "talk": talk, "apart": apart, "hands_on": hands_on, "says": says, "many": many, "crowd": crowd, "hold": hold, "cut": cut}[sys.argv[1]](*sys.argv[2:])
