// Walks a document store with MongoDB's driver for Node as it comes from its registry.
//
// Usage: documents.js URI. Prints one line of what was run.

"use strict";

const assert = require("node:assert/strict");
const { MongoClient, ObjectId, Long, Decimal128 } = require("mongodb");
const { version } = require("mongodb/package.json");

let checks = 0;

function same(found, wanted) {
  checks += 1;
  assert.deepEqual(found, wanted);
}

async function refused(code, work) {
  checks += 1;
  await assert.rejects(work, (error) => error.code === code);
}

async function crud(db) {
  const items = db.collection("items");
  const id = new ObjectId();
  same((await items.insertOne({ _id: id, n: 1, big: Long.fromString("9007199254740993"), price: Decimal128.fromString("1.10") })).insertedId, id);
  same((await items.insertMany([{ _id: 1, n: 2, tags: ["a", "b"] }, { _id: 2, n: 3, tags: ["b"] }])).insertedCount, 2);
  same((await items.findOne({ _id: id })).price.toString(), "1.10");
  same((await items.findOne({ _id: id }, { promoteLongs: false })).big.toString(), "9007199254740993");
  same((await items.updateMany({ tags: "b" }, { $inc: { n: 10 } })).modifiedCount, 2);
  same((await items.findOneAndUpdate({ _id: 1 }, { $push: { tags: "c" } }, { returnDocument: "after" })).tags, ["a", "b", "c"]);
  same((await items.updateOne({ _id: 7 }, { $set: { n: 7 } }, { upsert: true })).upsertedId, 7);
  const bulk = await items.bulkWrite([{ insertOne: { document: { _id: 8, n: 8 } } }, { deleteOne: { filter: { _id: 7 } } }]);
  same([bulk.insertedCount, bulk.deletedCount], [1, 1]);
  await items.createIndex({ n: 1 }, { unique: true });
  await refused(11000, () => items.insertOne({ n: 8 }));
  same((await items.find({ n: { $gte: 8 } }).sort({ n: -1 }).project({ n: 1, _id: 0 }).toArray()), [{ n: 13 }, { n: 12 }, { n: 8 }]);
  same(await items.distinct("tags"), ["a", "b", "c"]);
  same(await items.countDocuments({ n: { $gt: 1 } }), 3);
}

async function aggregate(db) {
  const sales = db.collection("sales");
  await sales.insertMany(Array.from({ length: 1000 }, (_, n) => ({ _id: n, shop: n % 7, sum: n })));
  const stages = [{ $group: { _id: "$shop", total: { $sum: "$sum" }, count: { $count: {} } } }, { $sort: { _id: 1 } }, { $limit: 2 }];
  same(await sales.aggregate(stages).toArray(), [{ _id: 0, total: 71071, count: 143 }, { _id: 1, total: 71214, count: 143 }]);
  let met = 0;
  for await (const one of sales.find().batchSize(50)) met += one.sum === one._id ? 1 : 0;
  same(met, 1000);
}

async function transactions(client, db) {
  const accounts = db.collection("accounts");
  await accounts.insertMany([{ _id: "a", money: 100 }, { _id: "b", money: 0 }]);
  const session = client.startSession();
  const move = (much) => async () => {
    await accounts.updateOne({ _id: "a" }, { $inc: { money: -much } }, { session });
    const left = await accounts.findOne({ _id: "a" }, { session });
    if (left.money < 0) throw new Error("not enough");
    await accounts.updateOne({ _id: "b" }, { $inc: { money: much } }, { session });
  };
  await session.withTransaction(move(30));
  await assert.rejects(() => session.withTransaction(move(300)), /not enough/);
  same(await accounts.find().sort({ _id: 1 }).toArray(), [{ _id: "a", money: 70 }, { _id: "b", money: 30 }]);
  session.startTransaction();
  await accounts.insertOne({ _id: "c", money: 1 }, { session });
  same(await accounts.countDocuments({}), 2);
  same(await accounts.countDocuments({}, { session }), 3);
  await session.abortTransaction();
  same(await accounts.countDocuments({}), 2);
  const add = async () => {
    const own = client.startSession();
    for (let turn = 0; turn < 5; turn += 1) {
      await own.withTransaction(async () => {
        const { money } = await accounts.findOne({ _id: "b" }, { session: own });
        await accounts.updateOne({ _id: "b" }, { $set: { money: money + 1 } }, { session: own });
      });
    }
    await own.endSession();
  };
  await Promise.all([add(), add(), add()]);
  same((await accounts.findOne({ _id: "b" })).money, 45);
  await session.endSession();
}

async function changes(db) {
  const watched = await db.createCollection("watched");
  const stream = watched.watch();
  // The stream is open once its first answer came.
  const next = stream.tryNext();
  await next;
  await watched.insertOne({ _id: 1 });
  same((await stream.next()).documentKey, { _id: 1 });
  await stream.close();
}

async function main() {
  const client = new MongoClient(process.argv[2], { serverSelectionTimeoutMS: 20000, maxPoolSize: 10 });
  await client.connect();
  const db = client.db("node");
  await db.dropDatabase();
  await crud(db);
  await aggregate(db);
  await transactions(client, db);
  await changes(db);
  await client.close();
  console.log(`mongodb for Node ${version}: ${checks} checks`);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
