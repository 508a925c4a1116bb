"""A forked child puts a connection into a set that its parent made, and the parent waits on it:
sockets_child_set.py. The kernel reports with what the child said, its own number."""

import os
import select
import socket

HIGH = 400  # a number that the parent has for nothing

listener = socket.create_server(("127.0.0.1", 0))
events = select.epoll()
told, tells = os.pipe()
hears, asks = os.pipe()
child = os.fork()
if child == 0:
    os.close(asks)
    peer = listener.accept()[0]
    os.dup2(peer.fileno(), HIGH, inheritable=False)
    peer.close()
    peer = socket.socket(fileno=HIGH)
    events.register(HIGH, select.EPOLLIN)
    os.write(tells, b"x")
    total = 0
    while os.read(hears, 1):
        total += len(peer.recv(6, socket.MSG_WAITALL))
        peer.sendall(b"echo")
        os.write(tells, b"x")
    os._exit(0 if total == 40 * 6 else 1)
os.close(hears)
one = socket.create_connection(listener.getsockname())
os.read(told, 1)
assert events.poll(0) == []
for number in range(40):
    one.sendall(b"before")
    assert events.poll(10) == [(HIGH, select.EPOLLIN)], number
    os.write(asks, b"x")
    os.read(told, 1)
    assert one.recv(4, socket.MSG_WAITALL) == b"echo"
    assert events.poll(0) == [], number
os.close(asks)
assert os.waitpid(child, 0)[1] == 0
print("heard")
