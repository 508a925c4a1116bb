"""A redis-py program whose first member of a cluster dies under it.

Arguments: the ports of all members, the first being the one that will die. It checks that any
member does, then increments a counter until a line arrives on standard input, and says `writing`
once it does; on an error it goes on at the next member, as programs with several addresses do, and
says `moved` once it goes on there. In the end every
acknowledged step has to be in the counter, once, and a transaction and a pipeline work at the
members that are left.
"""

import sys
import threading

import redis

ports = [int(word) for word in sys.argv[1:]]


def client(port):
    return redis.Redis(host="127.0.0.1", port=port, decode_responses=True, socket_timeout=15)


for port in ports:
    with client(port) as member:
        assert member.set(f"py:{port}", port)
        assert member.incrby("py:all", 2) > 0
        with member.pipeline(transaction=False) as pipeline:
            replies = pipeline.set("py:p", 1).incr("py:p").get("py:p").execute()
        assert replies == [True, 2, "2"], replies
        assert all(member.get(f"py:{known}") == str(known) for known in ports[: ports.index(port) + 1])

enough = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), enough.set()), daemon=True).start()

at, acknowledged, unknown, moves = 0, 0, 0, 0
# What to say after so many acknowledged steps.
due, word, said = 50, "writing", []
member = client(ports[0])
while not enough.is_set() or moves == 0:
    try:
        count = member.incr("py:count")
        acknowledged += 1
        assert acknowledged <= count <= acknowledged + unknown, (acknowledged, unknown, count)
        if acknowledged == due:
            print(word, flush=True)
            said.append(word)
    except redis.exceptions.RedisError:
        # It may have taken effect: its member died before it answered.
        unknown += 1
        moves += 1
        at = (at + 1) % len(ports)
        member = client(ports[at])
        if said == ["writing"]:
            due, word = acknowledged + 50, "moved"

for port in ports[1:]:
    with client(port) as member:
        count = int(member.get("py:count"))
        assert acknowledged <= count <= acknowledged + unknown, (acknowledged, unknown, count)
        with member.pipeline(transaction=True) as transaction:
            transaction.watch("py:count")
            transaction.multi()
            done = transaction.incr("py:transactions").set("py:done", "yes").execute()
        assert done[1] is True, done
print(f"fine: {acknowledged} acknowledged, {unknown} unknown", flush=True)
