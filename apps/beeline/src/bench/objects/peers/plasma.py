"""Plasma of pyarrow 11, through its Python client: answers "put SIZE BATCH SECONDS" and its like with
calls per second."""

import os
import subprocess
import sys
import time
import warnings

warnings.simplefilter("ignore")
import pyarrow.plasma as plasma

folder, memory = sys.argv[1:]
store = os.path.join(os.path.dirname(sys.executable), "plasma_store")
server = subprocess.Popen(
    [store, "-s", folder + "/plasma", "-m", memory, "-d", "/dev/shm"], stderr=subprocess.DEVNULL
)
client = plasma.connect(folder + "/plasma", num_retries=200)
clock = time.perf_counter
try:
    print("ready", flush=True)
    for line in sys.stdin:
        call, size, batch, seconds = line.split()
        data, batch = b"\7" * int(size), int(batch)
        kept = plasma.ObjectID.from_random()
        client.put_raw_buffer(data, kept)
        calls, took, end = 0, 0.0, clock() + float(seconds)
        while calls == 0 or clock() < end:
            start = clock()
            if call == "get":
                for _ in range(batch):
                    client.get_buffers([kept])
                took += clock() - start
            else:
                keys = [plasma.ObjectID.from_random() for _ in range(batch)]
                start = clock()
                for key in keys:
                    client.put_raw_buffer(data, key)
                put = clock() - start
                start = clock()
                for key in keys:
                    client.delete([key])
                took += put if call == "put" else clock() - start
            calls += batch
        client.delete([kept])
        print(calls / took, flush=True)
finally:
    server.kill()
