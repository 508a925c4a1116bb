"""A sequencer and a lock service, on the direct store and on Redis.

    beeline serve & redis-server --port 6380 &
    pip install ./python redis
    python examples/direct_locks.py --redis 127.0.0.1:6380

Sequencer: numbers without gaps for many clients, some at a time. Locks: one word each, 0 where free, the
holder's number where held, taken and given back by compare-and-swap; under the lock a counter is read
and written in two steps, which shows whether two ever held it together.
"""

import argparse
import threading
import time

import beeline

GIVE_BACK = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"


class OnDirect:
    def __init__(self, servers):
        self.store = beeline.direct.connect(servers)
        for key in ("sequence", "lock", "guarded"):
            self.store.put(key, 0)

    def numbers(self, count):
        with self.store.batch() as batch:
            taken = [batch.update("sequence", "add", 1) for _ in range(count)]
        return [result.value for result in taken]

    def take(self, holder):
        return self.store.compare_and_swap("lock", 0, holder) == 0

    def give_back(self, holder):
        assert self.store.compare_and_swap("lock", holder, 0) == holder, "the lock was not its holder's"

    def read(self):
        return int.from_bytes(self.store.get("guarded"), "little")

    def write(self, value):
        self.store.put("guarded", value)


class OnRedis:
    def __init__(self, address):
        import redis

        host, port = address.rsplit(":", 1)
        self.redis = redis.Redis(host, int(port))
        self.redis.delete("lock")
        self.redis.mset({"sequence": 0, "guarded": 0})
        self.script = self.redis.register_script(GIVE_BACK)

    def numbers(self, count):
        pipe = self.redis.pipeline(transaction=False)
        for _ in range(count):
            pipe.incr("sequence")
        return [number - 1 for number in pipe.execute()]

    def take(self, holder):
        return bool(self.redis.set("lock", holder, nx=True))

    def give_back(self, holder):
        assert self.script(keys=["lock"], args=[holder]) == 1, "the lock was not its holder's"

    def read(self):
        return int(self.redis.get("guarded"))

    def write(self, value):
        self.redis.set("guarded", value)


def together(clients, work):
    """Runs `work` with each client's number at once; the seconds that took."""
    threads = [threading.Thread(target=work, args=(client + 1,)) for client in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connect", help="nodes of the direct store, apart by commas")
    parser.add_argument("--redis", metavar="HOST:PORT", help="the same on this Redis, too")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--numbers", type=int, default=20_000, help="of each client")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--turns", type=int, default=300, help="under the lock, of each client")
    arguments = parser.parse_args()
    services = [("direct", OnDirect(arguments.connect))]
    if arguments.redis:
        services.append(("redis", OnRedis(arguments.redis)))
    for name, service in services:
        given = []

        def count(_, service=service, given=given):
            for _ in range(arguments.numbers // arguments.batch):
                given.extend(service.numbers(arguments.batch))

        seconds = together(arguments.clients, count)
        whole = sorted(given) == list(range(len(given)))
        print(f"{name}: {len(given) / seconds:.0f} numbers a second, {'no gap' if whole else 'GAPS'}")

        def guard(holder, service=service):
            for _ in range(arguments.turns):
                while not service.take(holder):
                    time.sleep(0.0001)
                service.write(service.read() + 1)
                service.give_back(holder)

        seconds = together(arguments.clients, guard)
        turns = arguments.clients * arguments.turns
        kept = "one holder at a time" if service.read() == turns else "TWO HOLDERS"
        print(f"{name}: {turns / seconds:.0f} turns under the lock a second, {kept}")


if __name__ == "__main__":
    main()
