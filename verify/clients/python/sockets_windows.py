"""Two ends of conversations: `serve HOST PORT COUNT` and `talk HOST PORT`.

What `talk` prints depends on what the sockets do and on nothing else, so that it can be compared with what it
prints over the kernel's.
"""

import errno
import hashlib
import os
import select
import socket
import struct
import sys


def echo(connection):
    """Sends back what comes, until the end; by an epoll set and without waiting."""
    connection.setblocking(False)
    waiting = select.epoll()
    waiting.register(connection.fileno(), select.EPOLLIN)
    queued, ended = b"", False
    while not ended or queued:
        mask = (0 if ended or len(queued) > 1 << 20 else select.EPOLLIN) | (select.EPOLLOUT if queued else 0)
        waiting.modify(connection.fileno(), mask)
        for _, events in waiting.poll(30):
            if events & (select.EPOLLIN | select.EPOLLHUP) and not ended:
                try:
                    more = connection.recv(65536)
                    ended = not more
                    queued += more
                except BlockingIOError:
                    pass
                except ConnectionResetError:
                    return
            if queued:
                try:
                    queued = queued[connection.send(queued) :]
                except BlockingIOError:
                    pass
                except (BrokenPipeError, ConnectionResetError):
                    return


def serve(host, port, count):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    print("listening", flush=True)
    for _ in range(count):
        connection, peer = listener.accept()
        assert connection.getsockname() == (host, port)
        try:
            assert peer == connection.getpeername()
        except OSError:
            pass  # It was broken off before.
        child = os.fork()
        if child == 0:
            listener.close()
            echo(connection)
            connection.close()
            os._exit(0)
        connection.close()
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break


def exactly(connection, count):
    pieces = []
    while count:
        piece = connection.recv(min(count, 1 << 16))
        if not piece:
            break
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def talk(host, port):
    connection = socket.create_connection((host, port))
    print("family", connection.family, "peer", connection.getpeername() == (host, port))
    print("again", errno.errorcode.get(connection.connect_ex((host, port))))
    for size in (1, 7, 1024, 4088, 4089, 65536, 1 << 20):
        data = hashlib.sha256(str(size).encode()).digest() * (size // 32 + 1)
        data = data[:size]
        writer = os.fork()
        if writer == 0:
            connection.sendall(data)
            os._exit(0)
        print("size", size, exactly(connection, size) == data, os.waitpid(writer, 0)[1])
    print("nodelay", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print("nodelay", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    print("error", connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    print("readable", select.select([connection], [connection], [], 0.05)[0] == [])
    connection.sendall(b"peeked")
    print("peek", select.select([connection], [], [], 30)[0] == [connection])
    print("peek", connection.recv(3, socket.MSG_PEEK), connection.recv(6, socket.MSG_WAITALL))
    connection.settimeout(0.05)
    try:
        connection.recv(1)
    except socket.timeout:
        print("timed out")
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError as error:
        print("blocks", errno.errorcode[error.errno])
    sent = 0
    try:
        while sent < 1 << 26:
            sent += connection.send(b"x" * 65536)
    except BlockingIOError:
        print("full")
    connection.setblocking(True)
    print("all", len(exactly(connection, sent)) == sent)
    poller = select.poll()
    poller.register(connection, select.POLLIN | select.POLLOUT)
    print("poll", poller.poll(100) == [(connection.fileno(), select.POLLOUT)])
    copy = connection.dup()
    copy.sendall(b"by a copy")
    print("copy", exactly(connection, 9))
    copy.close()
    print("vector", connection.sendmsg([b"one ", b"two ", b"three"]), exactly(connection, 13))
    connection.shutdown(socket.SHUT_WR)
    try:
        connection.send(b"late")
    except BrokenPipeError:
        print("pipe")
    print("end", connection.recv(10), connection.recv(10))
    connection.close()
    other = socket.create_connection((host, port))
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.sendall(b"reset")
    other.close()
    third = socket.socket()
    third.setblocking(False)
    print("begun", third.connect_ex((host, port)) in (0, errno.EINPROGRESS))
    select.select([], [third], [], 30)
    third.setblocking(True)
    third.sendall(b"not waited for")
    print("third", exactly(third, 14))


if sys.argv[1] == "serve":
    serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
else:
    talk(sys.argv[2], int(sys.argv[3]))
