"""A parameter server: sparse logistic regression by several workers, on the direct store and on Redis.

    beeline serve & redis-server --port 6380 &
    pip install ./python numpy redis
    python examples/direct_parameter_server.py --redis 127.0.0.1:6380

The weights lie in blocks of 16 numbers, one key each. A worker reads the blocks its samples touch,
computes the gradient, and adds it: one packet each way for a batch. On the direct store the addition is an
atomic vector update at the server. Redis has no vector addition, so there each weight is a field of its
own that HINCRBYFLOAT changes.
"""

import argparse
import threading
import time

import numpy as np

import beeline

BLOCK = 16


def samples(count: int, features: int, active: int, seed: int):
    """Sparse samples of a known model, and whether each is positive."""
    generator = np.random.default_rng(seed)
    truth = np.random.default_rng(0).normal(size=features)
    where = np.stack([generator.choice(features, active, replace=False) for _ in range(count)])
    score = truth[where].sum(axis=1)
    return where, (score > 0).astype("f4")


class OnDirect:
    def __init__(self, servers, features):
        self.store = beeline.direct.connect(servers)
        with self.store.batch() as batch:
            for block in range(0, features, BLOCK):
                batch.put(f"w{block}", [0.0] * BLOCK, dtype="f4")

    def read(self, blocks):
        with self.store.batch() as batch:
            found = [batch.get(f"w{block}") for block in blocks]
        return np.concatenate([np.frombuffer(result.value, dtype="f4") for result in found])

    def add(self, blocks, change):
        with self.store.batch() as batch:
            for block, part in zip(blocks, change.reshape(-1, BLOCK)):
                batch.update_vector(f"w{block}", "add", part, dtype="f4", returning=False)


class OnRedis:
    def __init__(self, address, features):
        import redis

        host, port = address.rsplit(":", 1)
        self.redis = redis.Redis(host, int(port))
        pipe = self.redis.pipeline(transaction=False)
        for block in range(0, features, BLOCK):
            pipe.delete(f"w{block}")
        pipe.execute()

    def read(self, blocks):
        pipe = self.redis.pipeline(transaction=False)
        for block in blocks:
            pipe.hmget(f"w{block}", range(BLOCK))
        return np.array([float(w or 0) for fields in pipe.execute() for w in fields], dtype="f4")

    def add(self, blocks, change):
        pipe = self.redis.pipeline(transaction=False)
        for block, part in zip(blocks, change.reshape(-1, BLOCK)):
            for field in np.flatnonzero(part):
                pipe.hincrbyfloat(f"w{block}", int(field), float(part[field]))
        pipe.execute()


def train(server, arguments):
    """Runs the workers; the seconds that took."""

    def work(worker):
        where, label = samples(arguments.samples, arguments.features, 20, worker + 1)
        for start in range(0, len(where), arguments.batch):
            some, wanted = where[start : start + arguments.batch], label[start : start + arguments.batch]
            blocks = np.unique(some // BLOCK * BLOCK)
            place = np.searchsorted(blocks, some // BLOCK * BLOCK) * BLOCK + some % BLOCK
            weights = server.read(blocks)
            error = wanted - 1 / (1 + np.exp(-weights[place].sum(axis=1)))
            change = np.zeros(len(weights), dtype="f4")
            np.add.at(change, place, np.repeat(0.1 * error[:, None], place.shape[1], axis=1))
            server.add(blocks, change)

    began = time.perf_counter()
    workers = [threading.Thread(target=work, args=(worker,)) for worker in range(arguments.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began


def accuracy(server, arguments):
    where, label = samples(1000, arguments.features, 20, 1_000_000)
    weights = server.read(range(0, arguments.features, BLOCK))
    return float(((weights[where].sum(axis=1) > 0) == (label > 0)).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connect", help="nodes of the direct store, apart by commas")
    parser.add_argument("--redis", metavar="HOST:PORT", help="the same on this Redis, too")
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=20_000, help="of each worker")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    servers = [("direct", OnDirect(arguments.connect, arguments.features))]
    if arguments.redis:
        servers.append(("redis", OnRedis(arguments.redis, arguments.features)))
    for name, server in servers:
        seconds = train(server, arguments)
        rate = arguments.workers * arguments.samples / seconds
        right = accuracy(server, arguments)
        print(f"{name}: {rate:.0f} samples a second, {right:.1%} of new samples right")


if __name__ == "__main__":
    main()
