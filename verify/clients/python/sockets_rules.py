"""What the kernel's rules say, told line by line: sockets_rules.py WHAT ARGUMENTS ...

Run with the library and without, the lines of `numbers` and `files` are the same."""

import errno
import fcntl
import hashlib
import os
import random
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time


def connected(address=("127.0.0.1", 0)):
    """Two ends of a connection, both of which have sent and received."""
    with socket.socket() as listener:
        listener.bind(address)
        listener.listen(1)
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for _ in range(3):
        one.sendall(b"12345678")
        assert other.recv(8) == b"12345678"
        other.sendall(b"12345678")
        assert one.recv(8) == b"12345678"
    return one, other


def outcome(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]


def numbers(seed, steps):
    """Random opens, copies and closes: every number that comes out."""
    chance = random.Random(int(seed))
    os.closerange(3, 256)
    folder = tempfile.mkdtemp()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    address = listener.getsockname()
    mine = [listener.fileno()]

    def pair():
        one = socket.create_connection(address)
        other, _ = listener.accept()
        one.sendall(b"x")
        other.recv(1)
        other.sendall(b"x")
        one.recv(1)
        return one.detach(), other.detach()

    def copy_to():
        target = chance.randrange(4, 120)
        if target == listener.fileno():
            return None
        return os.dup2(chance.choice(mine), target, chance.random() < 0.5)

    def copy_from():
        low = chance.randrange(0, 120)
        kind = chance.choice([fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC])
        return fcntl.fcntl(chance.choice(mine), kind, low)

    def close():
        fd = chance.choice(mine[1:] or [4])
        outcome(os.close, fd)
        return [fd]

    def close_range():
        first = chance.randrange(listener.fileno() + 1, 60)
        os.closerange(first, first + chance.randrange(1, 8))
        return list(range(first, first + 8))

    makers = [
        pair,
        lambda: socket.socket().detach(),
        lambda: [one.detach() for one in socket.socketpair()],
        lambda: os.open(folder, os.O_RDONLY),
        lambda: os.open("/dev/null", os.O_RDWR),
        os.pipe,
        lambda: os.eventfd(0),
        lambda: os.memfd_create("x"),
        lambda: os.dup(chance.choice(mine)),
        copy_to,
        copy_from,
    ]
    for step in range(int(steps)):
        if chance.random() < 0.45 and len(mine) > 1:
            closed = chance.choice([close, close, close, close_range])()
            mine = [fd for fd in mine if fd not in closed or fd == listener.fileno()]
            print(step, "closed", closed)
            continue
        if len(mine) > 100:
            continue
        maker = chance.choice(makers)
        made = outcome(maker)
        print(step, makers.index(maker), made)
        for fd in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(fd, int) and fd not in mine:
                mine.append(fd)
    here = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    print("open", [fd for fd in here if outcome(os.fstat, fd) != "EBADF"])


def files(seed, steps):
    """Calls on files, pipes, pairs and events beside connections: every answer."""
    chance = random.Random(int(seed))
    one, other = connected()
    path = os.path.join(tempfile.mkdtemp(), "file")
    plain = os.open(path, os.O_RDWR | os.O_CREAT)
    append = os.open(path, os.O_RDWR | os.O_APPEND)
    reading, writing = os.pipe2(os.O_NONBLOCK)
    other_reading, other_writing = os.pipe2(os.O_NONBLOCK)
    near, far = (end.detach() for end in socket.socketpair())
    for end in (near, far):
        os.set_blocking(end, False)
    event = os.eventfd(0, os.EFD_NONBLOCK)
    dead = os.dup(plain)
    os.close(dead)
    some = [plain, append, reading, writing, near, far, event, other_reading, other_writing]
    data = bytes(range(256)) * 40

    def pick():
        return chance.choice([*some, *some, dead])

    def piece():
        start = chance.randrange(5000)
        return data[start : start + chance.choice([0, 1, 8, 100, 5000])]

    def place():
        return chance.randrange(0, 20000)

    def digest(answer):
        return hashlib.sha1(answer).hexdigest()[:8] if isinstance(answer, bytes) else answer

    def poll():
        asked = [chance.choice(some) for _ in range(4)]
        poller = select.poll()
        for fd in asked:
            poller.register(fd)
        return sorted((some.index(fd), bits) for fd, bits in poller.poll(0))

    def chosen():
        ready = select.select([reading, near, event], [writing, far], [], 0)
        return [[some.index(fd) for fd in fds] for fds in ready]

    calls = [
        lambda: os.read(pick(), chance.choice([0, 8, 100, 9000])),
        lambda: os.write(pick(), piece()),
        lambda: os.write(event, struct.pack("=Q", chance.randrange(1, 5))),
        lambda: os.pread(pick(), 100, place()),
        lambda: os.pwrite(pick(), piece(), place()),
        lambda: os.lseek(pick(), place(), chance.choice([os.SEEK_SET, os.SEEK_END])),
        lambda: os.lseek(pick(), 0, os.SEEK_CUR),
        lambda: os.writev(pick(), [piece(), piece()]),
        lambda: os.readv(pick(), [bytearray(10), bytearray(200)]),
        lambda: os.ftruncate(pick(), place()),
        lambda: os.fsync(pick()),
        lambda: os.fstat(pick()).st_mode,
        lambda: os.isatty(pick()),
        lambda: fcntl.fcntl(pick(), fcntl.F_GETFL),
        lambda: fcntl.fcntl(pick(), fcntl.F_GETFD),
        lambda: struct.unpack("i", fcntl.ioctl(reading, 0x541B, b"\0" * 4)),
        lambda: os.sendfile(pick(), plain, place(), 3000),
        lambda: os.sendfile(near, plain, None, 100),
        lambda: os.copy_file_range(plain, append, 100, place(), None),
        lambda: os.splice(reading, other_writing, 1000),
        lambda: os.splice(plain, writing, 1000, offset_src=place()),
        lambda: os.posix_fallocate(plain, place(), 100),
        lambda: os.get_blocking(pick()),
        poll,
        chosen,
    ]
    for step in range(int(steps)):
        call = chance.randrange(len(calls))
        answer = outcome(calls[call])
        print(step, call, digest(answer))
        if step % 50 == 0:
            # The connections live on beside it all.
            one.sendall(b"%8d" % step)
            assert other.recv(8) == b"%8d" % step
    with open(path, "rb") as file:
        print(digest(file.read()))


RECORD = struct.Struct("=IIQ48s")


def record(sender, turn):
    body = bytes([(sender * 31 + turn) % 251]) * 48
    return RECORD.pack(sender, turn, sender * 1_000_003 + turn, body)


def threads(count, turns):
    """So many threads send records on one end, as many receive on the other."""
    count, turns = int(count), int(turns)
    one, other = connected()
    lists = [[] for _ in range(count)]

    def send(sender):
        for turn in range(turns):
            assert one.send(record(sender, turn)) == RECORD.size

    def receive(seen):
        while piece := other.recv(RECORD.size):
            assert len(piece) == RECORD.size, len(piece)
            seen.append(piece)

    receivers = [threading.Thread(target=receive, args=(seen,)) for seen in lists]
    senders = [threading.Thread(target=send, args=(index,)) for index in range(count)]
    for thread in receivers + senders:
        thread.start()
    for thread in senders:
        thread.join()
    one.shutdown(socket.SHUT_WR)
    for thread in receivers:
        thread.join()
    total = {}
    for seen in lists:
        last = {}
        for piece in seen:
            sender, turn, check, body = RECORD.unpack(piece)
            assert piece == record(sender, turn), piece
            # What one thread takes, it takes in the order in which it was sent.
            assert last.get(sender, -1) < turn, (sender, turn)
            last[sender] = turn
            total[sender, turn] = total.get((sender, turn), 0) + 1
    assert len(total) == count * turns and set(total.values()) == {1}
    print("whole and in order; taken by each:", sorted(len(seen) for seen in lists))


def forked():
    """Parent and child write to a connection that both have, and make new ones of their own."""
    log, reader = connected()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(4)
    told, tell = os.pipe()
    child = os.fork()
    name = b"child " if child == 0 else b"parent"
    if child == 0:
        reader.close()
    # The number that the child just closed is its lowest; the parent closes the same one's like.
    if child:
        spare = os.dup(reader.fileno())
        os.close(reader.detach())
    mine = socket.create_connection(listener.getsockname())
    for turn in range(200):
        log.sendall(b"%s %4d\n" % (name, turn))
    mine.sendall(name)
    if child == 0:
        os.write(tell, b"%d" % mine.fileno())
        assert mine.recv(6) == b"child "
        os._exit(0)
    reader = socket.socket(fileno=spare)
    for _ in range(2):
        peer, _ = listener.accept()
        what = peer.recv(6)
        peer.sendall(what)
        peer.close()
    assert mine.recv(6) == b"parent"
    assert os.waitpid(child, 0)[1] == 0
    same = int(os.read(told, 20)) == mine.fileno()
    lines = b""
    while lines.count(b"\n") < 400:
        lines += reader.recv(65536)
    for name in (b"child ", b"parent"):
        turns = [int(line[7:]) for line in lines.splitlines() if line.startswith(name)]
        assert turns == list(range(200)), (name, turns[:5])
    print("both wrote everything; the same number for two connections:", same)


def again(port, fd=None, turns="0", closed=None):
    """Talks, then becomes this program anew, some times, on the same connection."""
    if fd is None:
        peer = socket.create_connection(("127.0.0.1", int(port)))
        closed = socket.create_connection(("127.0.0.1", int(port)))
        closed.sendall(b"close me\n")
        assert closed.recv(100) == b"close me\n"
        closed = closed.detach()
    else:
        peer = socket.socket(fileno=int(fd))
        # It was to be closed by exec, and its number is free.
        assert outcome(os.fstat, int(closed)) == "EBADF"
    turn = int(turns)
    for index in range(20):
        line = b"turn %d line %d\n" % (turn, index)
        peer.sendall(line)
        assert peer.recv(100) == line
    if turn == 4:
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(100) == b""
        print("five programs, one connection")
        return
    peer.set_inheritable(True)
    words = [sys.executable, __file__, "again", port, str(peer.detach()), str(turn + 1)]
    os.execv(sys.executable, [*words, str(closed)])


def echo(port, processes="1", idle="0"):
    """Echoes, by several processes on one listener, some of which never accept."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(port)))
    listener.listen(64)
    for index in range(int(processes)):
        if index == int(processes) - 1 or os.fork() == 0:
            break
    if index < int(idle):
        signal.pause()
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=answer, args=(peer,), daemon=True).start()


def answer(peer):
    while piece := peer.recv(65536):
        peer.sendall(piece)
    peer.close()


def many(port, count):
    """So many short conversations, one after another."""
    for turn in range(int(count)):
        with socket.create_connection(("127.0.0.1", int(port)), timeout=20) as peer:
            peer.sendall(b"%8d" % turn)
            assert peer.recv(8) == b"%8d" % turn
    print("all answered")


def full():
    """A ring full of bytes, then a close: the reader gets them all, then the end."""
    for _ in range(5):
        one, other = connected()
        one.setblocking(False)
        sent = hashlib.sha1()
        count = 0
        block = os.urandom(10_000)
        while True:
            try:
                length = one.send(block)
            except BlockingIOError:
                break
            sent.update(block[:length])
            count += length
        one.close()
        taken = hashlib.sha1()
        while piece := other.recv(9999):
            taken.update(piece)
            count -= len(piece)
        assert count == 0 and taken.digest() == sent.digest(), count
        other.close()
    print("every byte, then the end")


def compute():
    """One process has a connection and computes; the others who have it are not kept waiting."""
    one, other = connected()
    child = os.fork()
    if child == 0:
        # Its last act on the connection, then no call at all.
        other.sendall(b"child")
        begun = time.monotonic()
        while time.monotonic() - begun < 20:
            sum(range(10_000))
        os._exit(0)
    assert one.recv(5) == b"child"
    longest = 0
    busy = threading.Thread(target=lambda: sum(range(30_000_000)))
    busy.start()
    for turn in range(500):
        begun = time.monotonic()
        other.sendall(b"%8d" % turn)
        assert one.recv(8) == b"%8d" % turn
        one.sendall(b"%8d" % turn)
        assert other.recv(8) == b"%8d" % turn
        longest = max(longest, time.monotonic() - begun)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    busy.join()
    # A child that kept a half would keep it for twenty seconds.
    assert longest < 10, longest
    print("longest turn beside a computing process: %.1f ms" % (1000 * longest))


def crowd(pairs, turns):
    """So many pairs of processes on one processor: all come to their end."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pairs, turns = int(pairs), int(turns)
    children = []
    begun = time.monotonic()
    for _ in range(pairs):
        one, other = connected()
        for near, far, first in ((one, other, True), (other, one, False)):
            child = os.fork()
            if child == 0:
                far.close()
                for turn in range(turns):
                    if first:
                        near.sendall(b"%8d" % turn)
                    assert near.recv(8) == b"%8d" % turn
                    if not first:
                        near.sendall(b"%8d" % turn)
                os._exit(0)
            children.append(child)
        one.close()
        other.close()
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    took = time.monotonic() - begun
    each = 1e6 * took / (pairs * turns)
    used = os.times().children_user + os.times().children_system
    print("%d processes: %.1f us a round trip, %.0f%% of a processor" % (
        2 * pairs, each, 100 * used / took))


def scarce(port, what):
    """Connections where descriptors or memory run out: each is right, accelerated or not."""
    import resource

    done = 0
    for spare in range(6):
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0, (what, spare)
            done += 1
            continue
        if what == "descriptors":
            # As many free numbers as `spare`, and one for the socket.
            top = max(int(name) for name in os.listdir("/proc/self/fd"))
            limit = 20 + top
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            while True:
                try:
                    last = os.open("/dev/null", os.O_RDONLY)
                except OSError:
                    break
            for fd in range(last, last - spare - 1, -1):
                os.close(fd)
        else:
            with open("/proc/self/statm") as statm:
                pages = int(statm.read().split()[0])
            limit = pages * 4096 + (spare << 17)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        peer = socket.socket()
        peer.connect(("127.0.0.1", int(port)))
        for turn in range(200):
            peer.sendall(b"%8d" % turn)
            assert peer.recv(8) == b"%8d" % turn
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(8) == b""
        os._exit(0)
    print("all right in", done)


def late(monitor, what):
    """One end loses the monitor's answer; the other asks afterwards. Neither may be misled."""
    import resource

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(4)
    one = socket.socket()
    which = resource.RLIMIT_AS if what == "memory" else resource.RLIMIT_NOFILE
    before = resource.getrlimit(which)
    if what == "slow":
        os.kill(int(monitor), signal.SIGSTOP)
    elif what == "descriptors":
        # One free number: enough to ask, too few to be answered.
        top = max(int(name) for name in os.listdir("/proc/self/fd"))
        while (last := os.open("/dev/null", os.O_RDONLY)) <= top:
            pass
        resource.setrlimit(which, (last + 2, before[1]))
    elif what == "memory":
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[0])
        resource.setrlimit(which, (pages * 4096 + (100 << 10), before[1]))
    one.connect(listener.getsockname())
    resource.setrlimit(which, before)
    if what == "slow":
        os.kill(int(monitor), signal.SIGCONT)
        # After an answer that did not come, a second passes before the next question.
        time.sleep(1.3)
    other, _ = listener.accept()
    for end in (one, other):
        end.settimeout(10)
    for turn in range(200):
        for near, far in ((one, other), (other, one)):
            near.sendall(b"%8d" % turn)
            assert far.recv(8) == b"%8d" % turn, turn
    print("not misled")


def signals(count):
    """A signal with each message, for who asks for it when the connection is made."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    came = []
    signal.signal(signal.SIGIO, lambda *_: came.append(True))
    fcntl.fcntl(other, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(other, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    for turn in range(int(count)):
        came.clear()
        one.sendall(b"12345678")
        until = time.monotonic() + 30
        while not came:
            assert time.monotonic() < until, f"no signal with message {turn}"
            time.sleep(0.001)
        assert other.recv(8) == b"12345678"
    print("a signal with each of", count, "messages")


def million():
    """A wait that has room for more answers than anybody gives."""
    one, other = connected()
    events = select.epoll()
    events.register(other, select.EPOLLIN)
    assert events.poll(0, 2**20 + 1) == []
    one.sendall(b"x")
    assert events.poll(10, 2**20 + 1) == [(other.fileno(), select.EPOLLIN)]
    print("heard")


globals()[sys.argv[1]](*sys.argv[2:])
