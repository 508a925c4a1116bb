"""Sends a connection to a program that lacks the library, first without a descriptor left for its
carrier, then with enough: sockets_uncarried.py. The other program echoes on what it is sent."""

import errno
import os
import resource
import socket
import subprocess
import sys

ECHO = """
import socket, sys
through = socket.socket(fileno=0)
while True:
    _, fds, _, _ = socket.recv_fds(through, 10, 1)
    if not fds:
        break
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fds[0])
    while data := peer.recv(4096):
        peer.sendall(data)
"""

listener = socket.create_server(("127.0.0.1", 0))
one = socket.create_connection(listener.getsockname())
other = listener.accept()[0]
for number in range(40):
    one.sendall(b"before")
    other.sendall(other.recv(6, socket.MSG_WAITALL))
    assert one.recv(6, socket.MSG_WAITALL) == b"before"
near, far = socket.socketpair()
plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
child = subprocess.Popen([sys.executable, "-c", ECHO], stdin=far, env=plain)
far.close()
# The program has to be there, without the library, before it is looked for.
near.settimeout(0.3)
try:
    near.recv(1)
except TimeoutError:
    pass
near.settimeout(None)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
used = max(int(name) for name in os.listdir("/proc/self/fd"))
spare = []
while True:
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, limits[1]))
    try:
        spare.append(os.dup(0))
    except OSError:
        break
try:
    socket.send_fds(near, [b"x"], [other.fileno()])
    print("sent")
except OSError as error:
    print("refused", errno.errorcode[error.errno])
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
# Nothing was sent, and the connection is as it was.
one.sendall(b"still")
assert other.recv(5, socket.MSG_WAITALL) == b"still"
socket.send_fds(near, [b"x"], [other.fileno()])
other.close()
near.close()
for number in range(40):
    one.sendall(b"behind")
    assert one.recv(6, socket.MSG_WAITALL) == b"behind"
one.shutdown(socket.SHUT_WR)
assert one.recv(1) == b""
assert child.wait() == 0
print("echoed")
