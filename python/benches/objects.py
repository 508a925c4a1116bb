"""put, get and delete by size: Beeline beside Plasma (pyarrow 11) and Redis, in alternate turns.

    python python/benches/objects.py --program target/release/beeline

Peers that are not installed are left out. Each figure is the median of the turns, with the least
and the most. A turn puts some objects, gets them over and over for a fraction of a second, and deletes
them: a few thousand gets take milliseconds, in which the system has not yet found a processor for each
of the two threads.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

import beeline

GETTING = 0.25
SIZES = [1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 24, 1 << 26]


class Beeline:
    name = "beeline"

    def __init__(self, folder, program, memory):
        off = ["--resp-address", "off", "--http-address", "off",
               "--documents-address", "off"]
        self.node = subprocess.Popen(
            [program, "serve", "--json", "--data", folder, "--fabric-address", "127.0.0.1:0",
             "--capacity", "256MiB", "--segment-size", "1MiB",
             "--objects-memory", str(memory), "--objects-disk", "0", *off],
            stdout=subprocess.PIPE,
        )
        json.loads(self.node.stdout.readline())
        self.store = beeline.objects.connect(f"{folder}/objects.sock")

    def put(self, value):
        return self.store.put(value)

    def get(self, key):
        return self.store.get_buffer(key)

    def delete(self, key):
        self.store.delete(key)

    def stop(self):
        self.node.terminate()
        self.node.wait()


class Plasma:
    name = "plasma"

    def __init__(self, folder, program, memory):
        import warnings

        warnings.simplefilter("ignore")
        import pyarrow.plasma as plasma

        server = os.path.join(os.path.dirname(sys.executable), "plasma_store")
        self.plasma = plasma
        self.server = subprocess.Popen(
            [server, "-s", f"{folder}/plasma", "-m", str(memory), "-d", folder],
            stderr=subprocess.DEVNULL,
        )
        self.client = plasma.connect(f"{folder}/plasma", num_retries=200)

    def put(self, value):
        key = self.plasma.ObjectID.from_random()
        self.client.put_raw_buffer(value, key)
        return key

    def get(self, key):
        return self.client.get_buffers([key])[0]

    def delete(self, key):
        self.client.delete([key])

    def stop(self):
        self.server.terminate()
        self.server.wait()


class Redis:
    name = "redis"

    def __init__(self, folder, program, memory):
        import redis

        self.server = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", f"{folder}/redis", "--save", "",
             "--dir", folder],
            stdout=subprocess.DEVNULL,
        )
        self.client = redis.Redis(unix_socket_path=f"{folder}/redis")
        for _ in range(200):
            with contextlib.suppress(redis.ConnectionError):
                self.client.ping()
                break
            time.sleep(0.02)
        self.next = 0

    def put(self, value):
        self.next += 1
        self.client.set(self.next, value)
        return self.next

    def get(self, key):
        return self.client.get(key)

    def delete(self, key):
        self.client.delete(key)

    def stop(self):
        self.server.terminate()
        self.server.wait()


def turn(peer, value, count):
    """Calls per second of each kind."""
    start = time.perf_counter()
    keys = [peer.put(value) for _ in range(count)]
    put = count / (time.perf_counter() - start)
    start = time.perf_counter()
    rounds, spent = 0, 0.0
    while spent < GETTING:
        for key in keys:
            peer.get(key)
        rounds += 1
        spent = time.perf_counter() - start
    get = rounds * count / spent
    start = time.perf_counter()
    for key in keys:
        peer.delete(key)
    delete = count / (time.perf_counter() - start)
    return {"put": put, "get": get, "delete": delete}


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--program", default="beeline")
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--memory", type=int, default=1 << 30)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    with contextlib.ExitStack() as stack:
        peers = []
        for kind in (Beeline, Plasma, Redis):
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
            try:
                peer = kind(folder, options.program, options.memory)
            except (ImportError, OSError) as error:
                print(f"{kind.name} is left out: {error}", file=sys.stderr)
                continue
            stack.callback(peer.stop)
            peers.append(peer)
        for size in SIZES:
            value = np.random.default_rng(1).bytes(size)
            count = max(3, min(2000, (options.memory // 4) // size))
            figures = {peer.name: [] for peer in peers}
            for peer in peers:
                turn(peer, value, min(count, 100))
            for number in range(options.turns):
                for step in range(len(peers)):
                    peer = peers[(number + step) % len(peers)]
                    figures[peer.name].append(turn(peer, value, count))
            for call in ("put", "get", "delete"):
                row = {"size": size, "call": call}
                for name, turns in figures.items():
                    rates = sorted(figure[call] for figure in turns)
                    row[name] = [rates[0], statistics.median(rates), rates[-1]]
                if options.json:
                    print(json.dumps(row))
                    continue
                cells = [
                    f"{name} {middle:>10.0f}/s ({least:.0f}..{most:.0f})"
                    for name, (least, middle, most) in list(row.items())[2:]
                ]
                print(f"{size:>9} B {call:<6}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
