"""What members of a replica set do and refuse, as pymongo sees it.

Usage: documents_roles.py URI PHASE MEMBER, where MEMBER is the address of the first primary.
"""

import sys
import time

import pymongo
from pymongo.errors import AutoReconnect, NotPrimaryError, OperationFailure, WTimeoutError
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

uri, phase, first = sys.argv[1:4]
client = pymongo.MongoClient(uri, serverSelectionTimeoutMS=60000)
majority = client.roles.get_collection("things", write_concern=WriteConcern("majority", wtimeout=30000))


def at(host, **more):
    return pymongo.MongoClient(*host, directConnection=True, **more)


def refused(code, act):
    try:
        act()
    except (OperationFailure, NotPrimaryError) as error:
        got = error.code if isinstance(error, OperationFailure) else error.details.get("code")
        assert got == code, (code, error)
        return
    raise AssertionError(f"nothing was refused with {code}")


def eventually(what, look):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if look():
                return
        except AutoReconnect:
            pass
        time.sleep(0.05)
    raise AssertionError(what)


if phase == "roles":
    majority.insert_many([{"_id": n} for n in range(100)])
    client.roles.things.create_index("n")
    everywhere = majority.with_options(write_concern=WriteConcern(3, wtimeout=60000, j=True))
    everywhere.insert_one({"_id": "everywhere"})
    hello = client.admin.command("hello")
    assert hello["setName"] == "rs0" and len(hello["hosts"]) == 3 and hello["isWritablePrimary"], hello
    assert hello["primary"] == hello["me"] == first, hello
    eventually("two secondaries", lambda: len(client.secondaries) == 2)
    secondary = at(sorted(client.secondaries)[0])
    said = secondary.admin.command("hello")
    assert said["secondary"] and not said["isWritablePrimary"] and said["primary"] == first, said
    assert secondary.roles.things.count_documents({}) == 101
    # Reads go where the preference says; the default is the primary's alone.
    strict = secondary.roles.get_collection("things", write_concern=WriteConcern(1))
    refused(10107, lambda: strict.insert_one({"_id": "no"}))
    for preference in [ReadPreference.SECONDARY, ReadPreference.NEAREST, ReadPreference.SECONDARY_PREFERRED]:
        reader = client.roles.get_collection("things", read_preference=preference, read_concern=ReadConcern("majority"))
        assert reader.count_documents({"_id": "everywhere"}) == 1
    linear = client.roles.get_collection("things", read_concern=ReadConcern("linearizable"))
    assert linear.find_one({"_id": 7}) == {"_id": 7}
    # What a session wrote it reads, at a secondary too.
    with client.start_session(causal_consistency=True) as session:
        for n in range(20):
            majority.with_options(write_concern=WriteConcern(1)).insert_one({"_id": f"own {n}"}, session=session)
            reader = client.roles.get_collection("things", read_preference=ReadPreference.SECONDARY)
            assert reader.find_one({"_id": f"own {n}"}, session=session), n
    refused(79, lambda: client.roles.get_collection("things", write_concern=WriteConcern("nowhere")).insert_one({}))
    refused(100, lambda: client.roles.get_collection("things", write_concern=WriteConcern(4)).insert_one({}))
    # A change stream goes on at another member with the same token.
    with client.roles.things.watch() as stream:
        majority.insert_one({"_id": "seen"})
        change = stream.next()
        assert change["documentKey"] == {"_id": "seen"}
    majority.insert_one({"_id": "seen next"})
    later = client.get_database("roles", read_preference=ReadPreference.SECONDARY)
    with later.things.watch(resume_after=change["_id"]) as stream:
        assert stream.next()["documentKey"] == {"_id": "seen next"}
    status = client.admin.command("replSetGetStatus")
    states = sorted(one["stateStr"] for one in status["members"])
    assert states == ["PRIMARY", "SECONDARY", "SECONDARY"], states
    print("roles: fine")
elif phase == "alone":
    # Nobody fetches: w=1 is acknowledged, more is not.
    host, port = first.split(":")
    alone = at((host, int(port))).roles
    one = alone.get_collection("things", write_concern=WriteConcern(1))
    one.insert_many([{"_id": f"alone {n}", "text": f"only here {n}"} for n in range(20)])
    one.update_one({"_id": 5}, {"$set": {"changed": True}})
    one.delete_one({"_id": 6})
    alone.get_collection("elsewhere", write_concern=WriteConcern(1)).insert_one({"_id": 1})
    try:
        alone.get_collection("things", write_concern=WriteConcern("majority", wtimeout=300)).insert_one({"_id": "wait"})
        raise AssertionError("a majority acknowledged although no member fetches")
    except WTimeoutError:
        pass
    print("alone: fine")
elif phase == "without":
    majority.insert_one({"_id": "without"})
    assert client.roles.things.find_one({"_id": "alone 7"}) is None
    client.roles.things.update_one({"_id": 5}, {"$set": {"other": True}})
    print("without: fine")
elif phase == "taken-back":
    host, port = first.split(":")
    member = at((host, int(port))).roles
    eventually("what the others wrote", lambda: member.things.find_one({"_id": "without"}))
    eventually("the newest", lambda: member.things.find_one({"_id": 5}) == {"_id": 5, "other": True})
    assert member.things.count_documents({"text": {"$regex": "^only here"}}) == 0
    assert member.things.find_one({"_id": 6}) == {"_id": 6}
    assert member.things.find_one({"_id": "wait"}) is None
    assert "elsewhere" not in member.list_collection_names()
    wanted = sorted(str(one["_id"]) for one in client.roles.things.find())
    eventually("the same", lambda: sorted(str(one["_id"]) for one in member.things.find()) == wanted)
    print("taken-back: fine")
