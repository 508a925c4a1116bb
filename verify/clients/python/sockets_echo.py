"""Both ends of many small conversations, as two processes: sockets_echo.py MODE PORT ..."""

import os
import select
import socket
import sys
import threading

HOST = os.environ.get("SOCKETS_HOST", "127.0.0.1")


def serve(port, mode):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, port))
    listener.listen(64)
    worker = start_worker() if mode == "pass" else None
    while True:
        peer, _ = listener.accept()
        if mode in ("fork", "exec"):
            child = os.fork()
            if child:
                peer.close()
                continue
            listener.close()
            if mode == "exec":
                go_on_in_another_program(peer)
            answer(peer)
            os._exit(0)
        if mode == "pass":
            first = peer.recv(65536)
            peer.sendall(first)
            socket.send_fds(worker, [b"%d" % len(first)], [peer.fileno()])
            peer.close()
            continue
        threading.Thread(target=answer, args=(peer,), daemon=True).start()


def go_on_in_another_program(peer):
    first = peer.recv(65536)
    peer.sendall(first)
    os.set_inheritable(peer.fileno(), True)
    words = [sys.executable, __file__, "answer", str(peer.fileno()), str(len(first))]
    os.execv(sys.executable, words)


def start_worker():
    """A process that answers on the connections it is sent."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    while True:
        total, fds, _, _ = socket.recv_fds(theirs, 100, 1)
        if not fds:
            os._exit(0)
        answer(socket.socket(fileno=fds[0]), int(total))


def answer(peer, total=0):
    """Echoes until the end, then says how much it was."""
    while True:
        data = peer.recv(65536)
        if not data:
            break
        total += len(data)
        peer.sendall(data)
    peer.sendall(b"total %d\n" % total)
    peer.close()


def pattern(start, length):
    return bytes((start + i) % 251 for i in range(length))


def some(peer, most):
    data = peer.recv(most)
    if not data:
        raise EOFError("the other end is gone")
    return data


def ask(port, how, rounds):
    peer = socket.create_connection((HOST, port), timeout=30)
    if how == "block":
        peer.settimeout(None)
    elif how == "poll":
        peer.setblocking(False)
    sent = 0
    for size in [(i * i * 37) % 9000 + 1 for i in range(rounds)]:
        data = pattern(sent, size)
        if how == "poll":
            check = talk_by_poll(peer, data)
        else:
            peer.sendall(data)
            check = b""
            while len(check) < size:
                check += some(peer, size - len(check))
        assert check == data, (sent, size)
        sent += size
    peer.setblocking(True)
    peer.shutdown(socket.SHUT_WR)
    rest = b""
    while piece := peer.recv(100):
        rest += piece
    assert rest == b"total %d\n" % sent, (rest, sent)
    print("echoed", sent)


def talk_by_poll(peer, data):
    """As an event loop does it, with epoll."""
    events = select.epoll()
    events.register(peer, select.EPOLLIN | select.EPOLLOUT)
    out, back = data, b""
    while len(back) < len(data):
        for _, ready in events.poll(30):
            if ready & select.EPOLLOUT and out:
                out = out[peer.send(out) :]
                if not out:
                    events.modify(peer, select.EPOLLIN)
            if ready & select.EPOLLIN:
                back += some(peer, 4096)
    events.close()
    return back


def main():
    mode, port = sys.argv[1], int(sys.argv[2])
    if mode == "answer":
        answer(socket.socket(fileno=port), int(sys.argv[3]))
    elif mode != "ask":
        serve(port, mode)
    else:
        ask(port, sys.argv[3], int(sys.argv[4]))


main()
