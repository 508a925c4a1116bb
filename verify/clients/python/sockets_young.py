"""Talks to itself over connections of which no byte went yet when PROGRAM was started with
redirections: sockets_young.py PROGRAM."""

import socket
import subprocess
import sys

listener = socket.create_server(("127.0.0.1", 0))
pairs = []
for _ in range(4):
    one = socket.create_connection(listener.getsockname())
    pairs.append((one, listener.accept()[0]))
words = [sys.argv[1], "nothing"]
done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
assert done.stdout == b"", done.stdout
for one, other in pairs:
    for number in range(40):
        data = bytes([number]) * 100
        one.sendall(data)
        other.sendall(other.recv(100, socket.MSG_WAITALL))
        assert one.recv(100, socket.MSG_WAITALL) == data, number
