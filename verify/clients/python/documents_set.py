"""A program of pymongo beside a replica set that loses members: what it was told is there in the end.

Usage: documents_set.py URI. Prints "writing", then "progress N" after every 25 acknowledged writes; ends its
writers at a line on its standard input, checks, prints "fine ..." or what is wrong.
"""

import sys
import threading
import time

import pymongo
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

uri = sys.argv[1]
client = pymongo.MongoClient(uri, serverSelectionTimeoutMS=60000, socketTimeoutMS=30000)
stop = threading.Event()
lock = threading.Lock()
told = 0
slowest = 0.0


def told_one(seconds):
    global told, slowest
    with lock:
        told += 1
        slowest = max(slowest, seconds)
        if told % 25 == 0:
            print(f"progress {told}", flush=True)


class Writer(threading.Thread):
    """Inserts numbered documents and counts them in one document, each once however often it is sent."""

    def __init__(self, name, concern):
        super().__init__(daemon=True)
        self.kind = name
        self.concern = concern
        self.acknowledged = []
        self.unknown = []
        self.steps = 0
        self.unknown_steps = 0
        self.problem = None

    def run(self):
        database = client.get_database("set", write_concern=self.concern)
        number = 0
        while not stop.is_set():
            number += 1
            began = time.monotonic()
            name = f"{self.kind}-{number}"
            try:
                database.things.insert_one({"_id": name, "n": number})
                self.acknowledged.append(name)
            except pymongo.errors.DuplicateKeyError:
                self.problem = f"{name} was inserted twice"
                return
            except PyMongoError:
                self.unknown.append(name)
            try:
                database.counters.update_one({"_id": self.kind}, {"$inc": {"n": 1}}, upsert=True)
                self.steps += 1
            except PyMongoError:
                self.unknown_steps += 1
            told_one(time.monotonic() - began)


class Mover(threading.Thread):
    """Moves between two accounts in transactions: the sum never changes."""

    def __init__(self):
        super().__init__(daemon=True)
        self.moves = 0
        self.problem = None

    def run(self):
        accounts = client.set.get_collection("accounts", write_concern=WriteConcern("majority"))

        def move(session):
            accounts.update_one({"_id": "a"}, {"$inc": {"n": -1}}, session=session)
            accounts.update_one({"_id": "b"}, {"$inc": {"n": 1}}, session=session)

        while not stop.is_set():
            try:
                with client.start_session() as session:
                    session.with_transaction(move, write_concern=WriteConcern("majority"))
                self.moves += 1
            except PyMongoError:
                pass
            time.sleep(0.01)


majority = WriteConcern("majority", wtimeout=30000)
accounts = client.set.get_collection("accounts", write_concern=majority)
accounts.insert_many([{"_id": "a", "n": 1000}, {"_id": "b", "n": 1000}])
client.set.get_collection("things", write_concern=majority).create_index("n")
writers = [
    Writer("majority", majority),
    Writer("journaled", WriteConcern("majority", j=True, wtimeout=30000)),
    Writer("one", WriteConcern(1)),
]
mover = Mover()
for thread in [*writers, mover]:
    thread.start()
print("writing", flush=True)
sys.stdin.readline()
stop.set()
for thread in [*writers, mover]:
    thread.join(120)
problems = [thread.problem for thread in [*writers, mover] if thread.problem]
problems += ["a thread hangs" for thread in [*writers, mover] if thread.is_alive()]

# All of it, as a majority has it.
client.set.get_collection("marks", write_concern=WriteConcern(3, wtimeout=60000)).insert_one({"_id": "end"})
things = client.set.get_collection("things", read_concern=ReadConcern("majority"))
there = {one["_id"] for one in things.find()}
lost_of_one = 0
for writer in writers:
    missing = [name for name in writer.acknowledged if name not in there]
    counter = client.set.counters.find_one({"_id": writer.kind}) or {"n": 0}
    if writer.kind == "one":
        lost_of_one = len(missing)
    elif missing:
        problems.append(f"{writer.kind}: {len(missing)} acknowledged are gone: {missing[:3]}")
    if writer.kind != "one" and counter["n"] < writer.steps:
        problems.append(f"{writer.kind}: counted {counter['n']}, acknowledged {writer.steps}")
    if counter["n"] > writer.steps + writer.unknown_steps:
        problems.append(f"{writer.kind}: counted {counter['n']} of {writer.steps} and {writer.unknown_steps} unknown")
if sum(one["n"] for one in client.set.accounts.find()) != 2000:
    problems.append("the sum of the accounts changed")

# Every member has the same, and its index agrees with its documents.
wanted = sorted(there)
for host in sorted(client.nodes):
    member = pymongo.MongoClient(*host, directConnection=True)
    database = member.get_database("set", read_preference=ReadPreference.SECONDARY_PREFERRED)
    deadline = time.monotonic() + 60
    while database.marks.find_one({"_id": "end"}) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    found = sorted(one["_id"] for one in database.things.find())
    if found != wanted:
        problems.append(f"{host} has {len(found)} of {len(wanted)} things")
    by_index = database.things.count_documents({"n": {"$gte": 0}}, hint="n_1")
    if by_index != len(found):
        problems.append(f"{host}: its index has {by_index} of {len(found)}")
    member.close()
acknowledged = sum(len(writer.acknowledged) + writer.steps for writer in writers)
unknown = sum(len(writer.unknown) + writer.unknown_steps for writer in writers)
figures = f"{acknowledged} acknowledged, {unknown} unknown, {mover.moves} transactions, {lost_of_one} of w=1 taken back, slowest {slowest:.1f} s"
print("; ".join(problems) if problems else f"fine {figures}", flush=True)
