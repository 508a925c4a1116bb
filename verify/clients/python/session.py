"""A redis-py user's script over everything the Redis door offers today.

Runs against a node on 127.0.0.1 and prints how many checks passed; the first that does not, ends
it with the difference. Usage: session.py --port PORT --protocol 2|3
"""

import argparse
import sys
import time

import redis

checks = 0


def same(what, found, expected):
    """One check."""
    global checks
    if found != expected:
        sys.exit(f"{what}: found {found!r}, expected {expected!r}")
    checks += 1


def true(what, found):
    same(what, bool(found), True)


def refused(what, call, *words):
    """One check that a call is refused with an error that holds the words."""
    global checks
    try:
        found = call()
    except redis.ResponseError as error:
        for word in words:
            if word not in str(error):
                sys.exit(f"{what}: refused with {error!s}, which lacks {word!r}")
        checks += 1
        return
    sys.exit(f"{what}: found {found!r}, expected an error")


def strings(r):
    same("set", r.set("s", "value"), True)
    same("get", r.get("s"), b"value")
    same("get absent", r.get("absent"), None)
    same("set nx on there", r.set("s", "x", nx=True), None)
    same("set xx on absent", r.set("absent", "x", xx=True), None)
    same("set get", r.set("s", "second", get=True), b"value")
    same("set ex", r.set("t", "v", ex=100), True)
    true("ttl", 98 <= r.ttl("t") <= 100)
    same("set keepttl", r.set("t", "w", keepttl=True), True)
    true("ttl kept", r.ttl("t") > 90)
    same("set px", r.set("t", "v", px=100_000), True)
    true("pttl", 98_000 <= r.pttl("t") <= 100_000)
    same("set clears ttl", r.set("t", "v"), True)
    same("no ttl", r.ttl("t"), -1)
    same("setex", r.setex("t", 50, "v"), True)
    same("psetex", r.psetex("t", 50_000, "v"), True)
    same("setnx absent", r.setnx("n", "1"), True)
    same("setnx there", r.setnx("n", "2"), False)
    same("getset", r.getset("n", "3"), b"1")
    same("getdel", r.getdel("n"), b"3")
    same("getdel gone", r.get("n"), None)
    same("getex", r.getex("t", persist=True), b"v")
    same("getex persisted", r.ttl("t"), -1)
    same("mset", r.mset({"a": "1", "b": "2", "c": "3"}), True)
    same("mget", r.mget("a", "absent", "c"), [b"1", None, b"3"])
    same("msetnx one there", r.msetnx({"c": "x", "d": "4"}), False)
    same("msetnx none set", r.exists("d"), 0)
    same("msetnx", r.msetnx({"d": "4", "e": "5"}), True)
    same("append", r.append("a", "23"), 3)
    same("strlen", r.strlen("a"), 3)
    same("strlen absent", r.strlen("absent"), 0)
    same("getrange", r.getrange("s", 0, 2), b"sec")
    same("getrange from the end", r.getrange("s", -3, -1), b"ond")
    same("setrange", r.setrange("s", 3, "XYZ"), 6)
    same("setrange result", r.get("s"), b"secXYZ")
    same("setrange pads", r.setrange("pad", 3, "x"), 4)
    same("setrange padding", r.get("pad"), b"\0\0\0x")
    same("incr", r.incr("i"), 1)
    same("incrby", r.incrby("i", 41), 42)
    same("decr", r.decr("i"), 41)
    same("decrby", r.decrby("i", 40), 1)
    same("incrbyfloat", r.incrbyfloat("f", 1.5), 1.5)
    same("incrbyfloat again", r.incrbyfloat("f", -0.25), 1.25)
    refused("incr of text", lambda: r.incr("s"), "not an integer")
    r.set("big", 2**63 - 1)
    refused("incr past the end", lambda: r.incr("big"), "overflow")
    binary = bytes(range(256)) * 40
    same("set binary", r.set(b"bin\0\r\nkey", binary), True)
    same("get binary", r.get(b"bin\0\r\nkey"), binary)
    large = b"v" * 300_000
    same("set large", r.set("large", large), True)
    same("get large", r.get("large"), large)
    same("empty value", (r.set("empty", ""), r.get("empty"), r.exists("empty")), (True, b"", 1))
    refused("set with two expiries", lambda: r.execute_command("SET", "s", "v", "EX", 1, "PX", 1), "syntax")
    refused("set with no time", lambda: r.execute_command("SET", "s", "v", "EX", 0), "invalid expire")
    refused("too few words", lambda: r.execute_command("GET"), "wrong number of arguments")
    refused("unknown", lambda: r.execute_command("NOSUCH", "x"), "unknown command")


def keys(r):
    r.flushdb()
    r.mset({f"k:{i}": i for i in range(50)})
    same("dbsize", r.dbsize(), 50)
    same("exists counts twice", r.exists("k:1", "k:1", "absent"), 2)
    same("del", r.delete("k:1", "k:2", "absent"), 2)
    same("unlink", r.unlink("k:3"), 1)
    same("type", r.type("k:4"), b"string")
    same("type absent", r.type("absent"), b"none")
    same("keys", sorted(r.keys("k:1?")), [b"k:%d" % i for i in range(10, 20)])
    same("scan_iter", len(set(r.scan_iter("k:*", count=7))), 47)
    same("scan with type", len(set(r.scan_iter("*", _type="string"))), 47)
    true("randomkey", r.randomkey().startswith(b"k:"))
    same("rename", r.rename("k:4", "renamed"), True)
    same("renamed", (r.get("renamed"), r.exists("k:4")), (b"4", 0))
    refused("rename absent", lambda: r.rename("absent", "x"), "no such key")
    same("renamenx there", r.renamenx("renamed", "k:5"), False)
    same("renamenx", r.renamenx("renamed", "again"), True)
    same("copy", r.copy("k:5", "copied"), True)
    same("copied", r.get("copied"), b"5")
    same("copy over", r.copy("k:6", "copied"), False)
    same("copy replace", (r.copy("k:6", "copied", replace=True), r.get("copied")), (True, b"6"))
    same("touch", r.touch("k:5", "absent"), 1)
    same("expire", r.expire("k:5", 100), True)
    same("expire nx", r.expire("k:5", 200, nx=True), False)
    same("expire xx", r.expire("k:5", 200, xx=True), True)
    same("expire gt", r.expire("k:5", 100, gt=True), False)
    same("expire lt", r.expire("k:5", 100, lt=True), True)
    same("expire absent", r.expire("absent", 100), False)
    at = int(time.time()) + 1000
    same("expireat", (r.expireat("k:5", at), r.expiretime("k:5")), (True, at))
    same("pexpireat", (r.pexpireat("k:5", at * 1000 + 7), r.pexpiretime("k:5")), (True, at * 1000 + 7))
    same("persist", (r.persist("k:5"), r.persist("k:5"), r.ttl("k:5")), (True, False, -1))
    same("ttl absent", (r.ttl("absent"), r.pttl("absent"), r.expiretime("absent")), (-2, -2, -2))
    same("expire in the past", (r.expire("k:7", -1), r.exists("k:7")), (True, 0))
    same("pexpire", r.pexpire("k:8", 30), True)
    time.sleep(0.1)
    same("expired", (r.get("k:8"), r.ttl("k:8")), (None, -2))


def databases(r, make):
    r.set("where", "zero")
    other = make(db=9)
    same("other database", other.get("where"), None)
    other.set("where", "nine")
    same("first database", r.get("where"), b"zero")
    same("dbsize of the other", other.dbsize(), 1)
    same("copy across", r.copy("where", "from zero", destination_db=9), True)
    same("copied across", other.get("from zero"), b"zero")
    same("flushdb", (other.flushdb(), other.dbsize()), (True, 0))
    same("first is left", r.get("where"), b"zero")
    refused("no such database", lambda: r.execute_command("SELECT", 16), "out of range")
    other.close()


def transactions(r, make):
    with r.pipeline() as p:
        p.set("x", 1).incr("x").get("x")
        same("transaction", p.execute(), [True, 2, b"2"])
    with r.pipeline(transaction=False) as p:
        for i in range(500):
            p.set(f"p:{i}", i)
        same("pipeline", p.execute(), [True] * 500)
    other = make()
    with r.pipeline() as p:
        p.watch("x")
        other.set("x", 99)
        p.multi()
        p.set("x", 5)
        try:
            p.execute()
            sys.exit("a watched key changed and the transaction went through")
        except redis.WatchError:
            same("watch", other.get("x"), b"99")
    with r.pipeline() as p:
        p.watch("x")
        value = int(p.get("x"))
        p.multi()
        p.set("x", value + 1)
        same("watch untouched", p.execute(), [True])
    with r.pipeline() as p:
        p.set("x", "text").incr("x").set("after", "yes")
        found = p.execute(raise_on_error=False)
        same("error inside", (found[0], type(found[1]), found[2]), (True, redis.ResponseError, True))
    refused("exec alone", lambda: r.execute_command("EXEC"), "without MULTI")
    other.close()


def connection(r, protocol):
    same("ping", r.ping(), True)
    same("echo", r.echo("hello"), b"hello")
    same("client id", isinstance(r.client_id(), int), True)
    same("setname", r.client_setname("tester"), True)
    true("getname", r.client_getname() in ("tester", b"tester"))
    true("client list", any(c["name"] == "tester" for c in r.client_list()))
    true("client info", r.client_info()["name"] == "tester")
    true("info", r.info("server")["redis_version"].startswith("7"))
    true("info keyspace", "db0" in r.info("keyspace"))
    true("command count", r.command_count() > 60)
    true("config get", "maxmemory" in r.config_get("maxmemory"))
    same("config set", r.config_set("maxmemory-policy", "allkeys-lru"), True)
    same("config read back", r.config_get("maxmemory-policy")["maxmemory-policy"], "allkeys-lru")
    r.config_set("maxmemory-policy", "noeviction")
    refused("config of nothing", lambda: r.config_set("no-such-setting", "1"), "nknown")
    hello = r.execute_command("HELLO")
    fields = hello if isinstance(hello, dict) else dict(zip(hello[::2], hello[1::2]))
    same("hello proto", fields[b"proto"], protocol)
    true("time", r.time()[0] > 1_600_000_000) if has(r, "TIME") else None


def has(r, name):
    try:
        r.execute_command(name)
        return True
    except redis.ResponseError:
        return False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--protocol", type=int, choices=(2, 3), required=True)
    arguments = parser.parse_args()

    def make(db=0):
        return redis.Redis(
            "127.0.0.1", arguments.port, db=db, protocol=arguments.protocol, socket_timeout=20
        )

    r = make()
    same("flushall", r.flushall(), True)
    strings(r)
    keys(r)
    databases(r, make)
    transactions(r, make)
    connection(r, arguments.protocol)
    same("flushall at the end", (r.flushall(), r.dbsize()), (True, 0))
    print(f"{checks} checks passed")


main()
