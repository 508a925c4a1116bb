// Walks a document store in MongoDB's shell, by the words that a person types there.
//
// Usage: mongosh URI documents_shell.js. Prints one line of what was run.

const assert = require("node:assert/strict");

let checks = 0;

function same(found, wanted) {
  checks += 1;
  // The shell's own objects have prototypes of their own.
  assert.deepEqual(JSON.parse(EJSON.stringify(found)), JSON.parse(EJSON.stringify(wanted)));
}

const items = db.getCollection("items");
same(items.insertMany([{ _id: 1, name: "tea", price: 3 }, { _id: 2, name: "cup", price: 7 }]).acknowledged, true);
same(items.find({ price: { $gt: 2 } }, { name: 1 }).sort({ price: -1 }).toArray(), [{ _id: 2, name: "cup" }, { _id: 1, name: "tea" }]);
items.createIndex({ price: 1 });
same(items.getIndexes().map((index) => index.name), ["_id_", "price_1"]);
const plan = items.find({ price: 3 }).explain().queryPlanner.winningPlan;
same([plan.stage, plan.inputStage.indexName], ["FETCH", "price_1"]);
same(items.updateOne({ _id: 1 }, { $inc: { price: 1 } }).modifiedCount, 1);
same(items.findOneAndUpdate({ _id: 2 }, { $set: { sold: true } }, { returnDocument: "after" }).sold, true);
same(items.aggregate([{ $group: { _id: null, sum: { $sum: "$price" } } }]).toArray(), [{ _id: null, sum: 11 }]);
same(items.countDocuments(), 2);
same(items.distinct("name").sort(), ["cup", "tea"]);
same(db.getCollectionNames(), ["items"]);
same(items.stats().count, 2);
same(db.adminCommand({ listDatabases: 1, nameOnly: true }).databases.map((one) => one.name), ["shop"]);
const session = db.getMongo().startSession();
session.startTransaction();
session.getDatabase("shop").items.insertOne({ _id: 3 });
same(items.countDocuments(), 2);
session.commitTransaction();
same(items.countDocuments(), 3);
same(rs.status().members.map((member) => member.stateStr), ["PRIMARY"]);
same(db.getRoles({ showBuiltinRoles: true }).roles, []);
same(db.getProfilingStatus().was, 0);
same(db.adminCommand({ fsync: 1 }).ok, 1);
same(db.adminCommand({ getDefaultRWConcern: 1 }).defaultWriteConcern.w, "majority");
let refused = 0;
try {
  items.insertOne({ _id: 1 });
} catch (error) {
  refused = error.code;
}
same(refused, 11000);
same(items.deleteMany({}).deletedCount, 3);
same(db.dropDatabase().ok, 1);
print(`fine: mongosh ${version()}, ${checks} checks`);
