"""Mooncake's store over TCP: one process holds the objects and another gets them; answers
"fetch SIZE BATCH SECONDS" with gets per second, each a new bytes object, and "into SIZE BATCH SECONDS"
with gets per second into one buffer that was registered before."""

import ctypes
import os
import socket
import subprocess
import sys
import time

from mooncake.store import MooncakeDistributedStore

folder, memory = sys.argv[1:3]


def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def connect(master, segment):
    store = MooncakeDistributedStore()
    buffer = int(memory) // 2
    host = f"127.0.0.1:{port()}"
    if store.setup(host, "P2PHANDSHAKE", segment, buffer, "tcp", "", f"127.0.0.1:{master}"):
        sys.exit("Mooncake's client does not start")
    return store


def registered(store, size):
    """A buffer of `size` bytes that were touched and registered, and its address."""
    buffer = ctypes.create_string_buffer(size)
    place = ctypes.addressof(buffer)
    ctypes.memset(place, 1, size)
    if store.register_buffer(place, size):
        sys.exit("Mooncake does not register a buffer")
    return buffer, place


# What it says of itself on standard output is not ours to read.
said = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

if len(sys.argv) > 3:
    # The process that holds the objects.
    holder = connect(sys.argv[3], int(memory))
    print("ready", file=said)
    for line in sys.stdin:
        key, size = line.split()
        print(holder.put(key, bytes(int(size))), file=said)
    sys.exit(0)

master = port()
program = os.path.join(os.path.dirname(sys.executable), "mooncake_master")
words = [f"-rpc_port={master}", f"-metrics_port={port()}", "-metrics_host=127.0.0.1"]
server = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
clock = time.perf_counter
try:
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", master), timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    far = subprocess.Popen(
        [sys.executable, __file__, folder, memory, str(master)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if far.stdout.readline().strip() != "ready":
        sys.exit("Mooncake's holder does not start")
    store = connect(master, 0)
    print("ready", file=said)
    known, buffers = set(), {}
    for line in sys.stdin:
        call, size, batch, seconds = line.split()
        # Two in turn, as ours.
        keys = [f"{size}-{number}" for number in range(2)]
        for key in keys if size not in known else []:
            far.stdin.write(f"{key} {size}\n")
            far.stdin.flush()
            if far.stdout.readline().strip() != "0":
                sys.exit("Mooncake's holder does not take the object")
            known.add(size)
        size = int(size)
        if call == "into" and size not in buffers:
            buffers[size] = registered(store, size)
        calls, end = 0, clock() + float(seconds)
        start = clock()
        while calls == 0 or clock() < end:
            key = keys[calls % 2]
            if call == "into":
                length = store.get_into(key, buffers[size][1], size)
            else:
                length = len(store.get(key))
            if length != size:
                sys.exit("Mooncake gives something else")
            calls += 1
        print(calls / (clock() - start), file=said)
    far.stdin.close()
    far.wait(timeout=20)
finally:
    server.kill()
