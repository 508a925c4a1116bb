"""Programs of two hosts: sockets_hosts.py MODE HOST PORT ..."""

import errno
import os
import random
import select
import signal
import socket
import sys
import threading
import time


def block(start, length):
    """The bytes from `start` on of a stream of which every byte is known."""
    out = bytearray()
    while len(out) < length:
        word = ((start + len(out)) // 8).to_bytes(8, "little")
        out += word[(start + len(out)) % 8 :]
    return bytes(out[:length])


def listen(host, port):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(256)
    return listener


def connect(host, port):
    peer = socket.create_connection((host, port), timeout=60)
    peer.settimeout(None)
    return peer


def pour(peer, total, seed):
    rest, chance = 0, random.Random(seed)
    while rest < total:
        size = min(chance.choice((1, 7, 100, 5000, 60000, 300000)), total - rest)
        peer.sendall(block(rest, size))
        rest += size
    peer.shutdown(socket.SHUT_WR)


def drain(peer, total):
    got = 0
    while data := peer.recv(200000):
        assert data == block(got, len(data)), f"wrong bytes at {got}"
        got += len(data)
    assert got == total, (got, total)


def both_ways(peer, total, seed):
    """Both directions at once, at random sizes, to the end of each."""
    failed = []

    def watched():
        try:
            pour(peer, total, seed)
        except BaseException as error:
            failed.append(error)
            raise

    writer = threading.Thread(target=watched)
    writer.start()
    drain(peer, total)
    writer.join()
    assert not failed, failed
    peer.close()


def bulk_server(host, port, total):
    def talk(peer):
        echo_words(peer)
        both_ways(peer, total, 1)

    listener = listen(host, port)
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=talk, args=(peer,), daemon=True).start()


LAST_WORD = b"\xff" * 8


def say(peer, word):
    peer.sendall(word)
    assert read_word(peer) == word


def read_word(peer):
    got = b""
    while len(got) < 8:
        piece = peer.recv(8 - len(got))
        assert piece, "the other end is gone"
        got += piece
    return got


def warm(peer):
    """Words to and fro; the other end echoes. They end where the file READY is there, or, without one, when both
    relays have had time for the connection."""
    ready, turn = os.environ.get("READY"), 0
    while not os.path.exists(ready) if ready else turn < 300:
        say(peer, turn.to_bytes(8, "little"))
        turn += 1
        time.sleep(0.001)
    say(peer, LAST_WORD)


def echo_words(peer):
    word = b""
    while word != LAST_WORD:
        word = read_word(peer)
        peer.sendall(word)


def fate(peer):
    """How a connection ends, for who goes on talking."""
    try:
        while data := peer.recv(65536):
            peer.sendall(data[:100])
        return "end"
    except OSError as error:
        return errno.errorcode[error.errno]


def unread_server(host, port):
    """Closes with bytes unread."""
    listener = listen(host, port)
    while True:
        peer, _ = listener.accept()
        echo_words(peer)
        select.select([peer], [], [])
        time.sleep(0.2)
        peer.close()


def unread(host, port):
    peer = connect(host, port)
    warm(peer)
    peer.sendall(b"x" * 100000)
    print(fate(peer))


def last_words_server(host, port):
    """Sends much, and closes at once, everything read."""
    listener = listen(host, port)
    while True:
        peer, _ = listener.accept()
        echo_words(peer)
        peer.sendall(block(0, 1_500_000))
        peer.close()


def last_words(host, port):
    peer = connect(host, port)
    warm(peer)
    time.sleep(0.3)
    drain(peer, 1_500_000)
    print("all of it")


def chatter_server(host, port):
    """Echoes, one process a connection, until killed. Says its number first."""
    listener = listen(host, port)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        peer, _ = listener.accept()
        if os.fork():
            peer.close()
            continue
        listener.close()
        peer.sendall(b"%16d" % os.getpid())
        try:
            while data := peer.recv(65536):
                peer.sendall(data)
        finally:
            os._exit(0)


def chatter(host, port, seconds):
    """Talks until the time is up, SIGTERM says so, or the other end is gone, and tells which."""
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    peer = connect(host, port)
    print("server", int(peer.recv(16, socket.MSG_WAITALL)), flush=True)
    until, sent, chance = time.monotonic() + float(seconds), 0, random.Random(5)
    try:
        while not told and time.monotonic() < until:
            size = chance.randrange(1, 20000)
            data = block(sent, size)
            peer.sendall(data)
            got = b""
            while len(got) < size:
                piece = peer.recv(size - len(got))
                if not piece:
                    print("end after", sent)
                    return
                got += piece
            assert got == data, sent
            sent += size
    except OSError as error:
        print(errno.errorcode[error.errno], "after", sent)
        return
    peer.shutdown(socket.SHUT_WR)
    assert peer.recv(1) == b""
    print("well after", sent)


def quiet(host, port, seconds):
    """Talks, then only listens: how does it hear of the end?"""
    peer = connect(host, port)
    print("server", int(peer.recv(16, socket.MSG_WAITALL)), flush=True)
    warm(peer)
    print("warm", flush=True)
    peer.settimeout(float(seconds))
    try:
        print("end" if not peer.recv(1) else "bytes")
    except TimeoutError:
        print("nothing")
    except OSError as error:
        print(errno.errorcode[error.errno])


LINE = 24


def fork_server(host, port, lines):
    """Parent and child both write to one connection, in lines; the parent closes first."""
    listener = listen(host, port)
    while True:
        peer, _ = listener.accept()
        echo_words(peer)
        child = os.fork()
        name = b"parent" if child else b"child_"
        for turn in range(lines):
            line = b"%s %016d\n" % (name, turn)
            assert len(line) == LINE
            peer.sendall(line)
            if turn % 100 == 0:
                time.sleep(0.001)
        if not child:
            # The parent has closed by now, and the connection is still there.
            time.sleep(0.5)
            peer.sendall(b"%-23s\n" % b"last")
            os._exit(0)
        peer.close()
        os.waitpid(child, 0)


def fork_client(host, port, lines):
    peer = connect(host, port)
    warm(peer)
    stream = b""
    while data := peer.recv(65536):
        stream += data
    assert len(stream) == LINE * (2 * lines + 1), len(stream)
    seen = {b"parent": 0, b"child_": 0}
    for at in range(0, len(stream) - LINE, LINE):
        name, number = stream[at : at + LINE].split()
        assert int(number) == seen[name], (name, number, seen)
        seen[name] += 1
    assert set(seen.values()) == {lines}, seen
    assert stream.endswith(b"%-23s\n" % b"last")
    print("every line of both")


def half_server(host, port):
    """Reads to the end, and then says how much it was, and more."""
    listener = listen(host, port)
    while True:
        peer, _ = listener.accept()
        echo_words(peer)
        total = 0
        while data := peer.recv(65536):
            assert data == block(total, len(data))
            total += len(data)
        time.sleep(0.2)
        peer.sendall(b"%16d" % total + block(0, 400_000))
        peer.close()


def half(host, port, total):
    peer = connect(host, port)
    warm(peer)
    pour(peer, total, 3)
    try:
        peer.sendall(b"x")
        raise AssertionError("sent after the end")
    except BrokenPipeError:
        pass
    assert int(peer.recv(16, socket.MSG_WAITALL)) == total
    drain(peer, 400_000)
    print("half and half")


def epoll_server(host, port):
    listener = listen(host, port)
    listener.setblocking(False)
    events = select.epoll()
    events.register(listener, select.EPOLLIN)
    peers, waiting = {}, {}
    while True:
        for fd, ready in events.poll():
            if fd == listener.fileno():
                peer, _ = listener.accept()
                peer.setblocking(False)
                peers[peer.fileno()], waiting[peer.fileno()] = peer, b""
                events.register(peer, select.EPOLLIN)
                continue
            peer, over = peers[fd], False
            try:
                if ready & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    data = peer.recv(65536)
                    waiting[fd] += data
                    over = not data
                if waiting[fd]:
                    waiting[fd] = waiting[fd][peer.send(waiting[fd]) :]
            except BlockingIOError:
                pass
            except OSError:
                over = True
            if over and not waiting[fd]:
                events.unregister(fd)
                peer.close()
                del peers[fd], waiting[fd]
                continue
            mask = select.EPOLLIN | (select.EPOLLOUT if waiting[fd] else 0)
            events.modify(fd, mask)


def many(host, port, count, rounds):
    """Many connections, each with words of its own, asked in no order."""
    chance = random.Random(11)
    peers = [connect(host, port) for _ in range(count)]
    sent = [0] * count
    for turn in range(rounds):
        some = chance.sample(range(count), max(1, count // 10))
        sizes = {at: chance.choice((1, 50, 3000)) for at in some}
        for at in some:
            peers[at].sendall(block(sent[at] + at, sizes[at]))
        for at in some:
            got = b""
            while len(got) < sizes[at]:
                piece = peers[at].recv(sizes[at] - len(got))
                assert piece, f"connection {at} ended in round {turn}"
                got += piece
            assert got == block(sent[at] + at, sizes[at]), (turn, at)
            sent[at] += sizes[at]
        if turn % 50 == 0:
            time.sleep(0.02)
    for peer in peers:
        peer.shutdown(socket.SHUT_WR)
    for peer in peers:
        assert peer.recv(1) == b""
    print("answered", sum(sent))


def main():
    mode, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    more = [int(word) for word in sys.argv[4:]]
    if mode == "bulk":
        peer = connect(host, port)
        warm(peer)
        both_ways(peer, more[0], 2)
        print("both ways", more[0])
        return
    globals()[mode](host, port, *more)


if __name__ == "__main__":
    main()
