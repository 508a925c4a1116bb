//! The commands themselves, in alphabetical order.

use super::flag::*;
use super::{Command, KeySpec, Scope, command, counted_spec, direct, key_spec};
use crate::commands::{
    connection, expiry, hashes, introspection, keys, keyspace_wide, node, slow, strings,
    transactions,
};

// Key specifications: what is done with the keys, index of the first, `ON` to the end, `PAIRS`
// where only every other argument is a key.
const GETEX_KEY: KeySpec =
    key_spec(&["RW", "access", "update"], 1, 0, 1, "RW and UPDATE because it changes the TTL");
const OW_INSERT_1: KeySpec = key_spec(&["OW", "insert"], 1, 0, 1, "");
const OW_INSERT_1_ON_PAIRS: KeySpec = key_spec(&["OW", "insert"], 1, -1, 2, "");
const OW_INSERT_2: KeySpec = key_spec(&["OW", "insert"], 2, 0, 1, "");
const OW_UPDATE_1: KeySpec = key_spec(&["OW", "update"], 1, 0, 1, "");
const OW_UPDATE_1_ON_PAIRS: KeySpec = key_spec(&["OW", "update"], 1, -1, 2, "");
const OW_UPDATE_2: KeySpec = key_spec(&["OW", "update"], 2, 0, 1, "");
const OW_UPDATE_COUNTED_1_PAIRS: KeySpec = counted_spec(&["OW", "update"], 1, 2);
const RM_DELETE_1_ON: KeySpec = key_spec(&["RM", "delete"], 1, -1, 1, "");
const RO_1: KeySpec = key_spec(&["RO"], 1, 0, 1, "");
const RO_1_ON: KeySpec = key_spec(&["RO"], 1, -1, 1, "");
const RO_2: KeySpec = key_spec(&["RO"], 2, 0, 1, "");
const RO_ACCESS_1: KeySpec = key_spec(&["RO", "access"], 1, 0, 1, "");
const RO_ACCESS_1_ON: KeySpec = key_spec(&["RO", "access"], 1, -1, 1, "");
const RW_ACCESS_DELETE_1: KeySpec = key_spec(&["RW", "access", "delete"], 1, 0, 1, "");
const RW_ACCESS_UPDATE_1: KeySpec = key_spec(&["RW", "access", "update"], 1, 0, 1, "");
const RW_DELETE_1: KeySpec = key_spec(&["RW", "delete"], 1, 0, 1, "");
const RW_INSERT_1: KeySpec = key_spec(&["RW", "insert"], 1, 0, 1, "");
const RW_UPDATE_1: KeySpec = key_spec(&["RW", "update"], 1, 0, 1, "");
const SET_KEY: KeySpec = key_spec(
    &["RW", "access", "update", "variable_flags"],
    1,
    0,
    1,
    "RW and ACCESS due to the optional `GET` argument",
);

static CLIENT: [Command; 14] = [
    command("client|getname", 2, NOSCRIPT | LOADING | STALE, &["@slow", "@connection"])
        .session(Scope::Connection, connection::client_getname)
        .docs("connection", "2.6.9", "Returns the name of the connection"),
    command("client|help", 2, LOADING | STALE, &["@slow", "@connection"])
        .session(Scope::Connection, connection::client_help)
        .docs("connection", "5.0.0", "Lists the subcommands"),
    command("client|id", 2, NOSCRIPT | LOADING | STALE, &["@slow", "@connection"])
        .session(Scope::Connection, connection::client_id)
        .docs("connection", "5.0.0", "Returns the number of the connection"),
    command("client|info", 2, NOSCRIPT | LOADING | STALE, &["@slow", "@connection"])
        .tips(&["nondeterministic_output"])
        .session(Scope::Connection, connection::client_info)
        .docs("connection", "6.2.0", "Describes this connection"),
    command(
        "client|kill",
        -3,
        ADMIN | NOSCRIPT | LOADING | STALE,
        &["@admin", "@slow", "@dangerous", "@connection"],
    )
    .session(Scope::Connection, connection::client_kill)
    .docs("connection", "2.4.0", "Closes connections"),
    command(
        "client|list",
        -2,
        ADMIN | NOSCRIPT | LOADING | STALE,
        &["@admin", "@slow", "@dangerous", "@connection"],
    )
    .tips(&["nondeterministic_output"])
    .session(Scope::Connection, connection::client_list)
    .docs("connection", "2.4.0", "Describes connections"),
    command(
        "client|no-evict",
        3,
        ADMIN | NOSCRIPT | LOADING | STALE,
        &["@admin", "@slow", "@dangerous", "@connection"],
    )
    .session(Scope::Connection, connection::client_no_evict)
    .docs("connection", "7.0.0", "Exempts the connection from eviction"),
    command("client|no-touch", 3, NOSCRIPT | LOADING | STALE, &["@slow", "@connection"])
        .session(Scope::Connection, connection::client_no_touch)
        .docs("connection", "7.2.0", "Keeps commands of the connection from marking keys used"),
    command(
        "client|pause",
        -3,
        ADMIN | NOSCRIPT | LOADING | STALE,
        &["@admin", "@slow", "@dangerous", "@connection"],
    )
    .session(Scope::Connection, connection::client_pause)
    .docs("connection", "2.9.50", "Holds commands back for a while"),
    command("client|reply", 3, NOSCRIPT | LOADING | STALE, &["@slow", "@connection"])
        .session(Scope::Connection, connection::client_reply)
        .docs("connection", "3.2.0", "Switches replies on and off"),
    command("client|setinfo", 4, NOSCRIPT | LOADING | STALE, &["@slow", "@connection"])
        .session(Scope::Connection, connection::client_setinfo)
        .docs("connection", "7.2.0", "Names the client library"),
    command("client|setname", 3, NOSCRIPT | LOADING | STALE, &["@slow", "@connection"])
        .session(Scope::Connection, connection::client_setname)
        .docs("connection", "2.6.9", "Names the connection"),
    command(
        "client|unblock",
        -3,
        ADMIN | NOSCRIPT | LOADING | STALE,
        &["@admin", "@slow", "@dangerous", "@connection"],
    )
    .session(Scope::Connection, connection::client_unblock)
    .docs("connection", "5.0.0", "Wakes a blocked connection"),
    command(
        "client|unpause",
        2,
        ADMIN | NOSCRIPT | LOADING | STALE,
        &["@admin", "@slow", "@dangerous", "@connection"],
    )
    .session(Scope::Connection, connection::client_unpause)
    .docs("connection", "6.2.0", "Ends a pause"),
];

static COMMAND: [Command; 6] = [
    command("command|count", 2, LOADING | STALE, &["@slow", "@connection"])
        .data(Scope::Connection, introspection::command_count)
        .docs("server", "2.8.13", "Counts the commands"),
    command("command|docs", -2, LOADING | STALE, &["@slow", "@connection"])
        .tips(&["nondeterministic_output_order"])
        .data(Scope::Connection, introspection::command_docs)
        .docs("server", "7.0.0", "Documents commands"),
    command("command|getkeys", -4, LOADING | STALE, &["@slow", "@connection"])
        .data(Scope::Connection, introspection::command_getkeys)
        .docs("server", "2.8.13", "Returns the keys of a command"),
    command("command|help", 2, LOADING | STALE, &["@slow", "@connection"])
        .data(Scope::Connection, introspection::command_help)
        .docs("server", "5.0.0", "Lists the subcommands"),
    command("command|info", -2, LOADING | STALE, &["@slow", "@connection"])
        .tips(&["nondeterministic_output_order"])
        .data(Scope::Connection, introspection::command_info)
        .docs("server", "2.8.13", "Describes commands"),
    command("command|list", -2, LOADING | STALE, &["@slow", "@connection"])
        .tips(&["nondeterministic_output_order"])
        .data(Scope::Connection, introspection::command_list)
        .docs("server", "7.0.0", "Names the commands"),
];

static CONFIG: [Command; 5] = [
    command(
        "config|get",
        -3,
        ADMIN | NOSCRIPT | LOADING | STALE,
        &["@admin", "@slow", "@dangerous"],
    )
    .data(Scope::Node, node::config_get)
    .docs("server", "2.0.0", "Returns parameters that match patterns"),
    command("config|help", 2, LOADING | STALE, &["@slow"])
        .data(Scope::Node, node::config_help)
        .docs("server", "5.0.0", "Lists the subcommands"),
    command(
        "config|resetstat",
        2,
        ADMIN | NOSCRIPT | LOADING | STALE,
        &["@admin", "@slow", "@dangerous"],
    )
    .data(Scope::Node, node::config_resetstat)
    .docs("server", "2.0.0", "Sets the statistics to zero"),
    command(
        "config|rewrite",
        2,
        ADMIN | NOSCRIPT | LOADING | STALE,
        &["@admin", "@slow", "@dangerous"],
    )
    .data(Scope::Node, node::config_rewrite)
    .docs("server", "2.8.0", "Writes the configuration to its file"),
    command(
        "config|set",
        -4,
        ADMIN | NOSCRIPT | LOADING | STALE,
        &["@admin", "@slow", "@dangerous"],
    )
    .tips(&["request_policy:all_nodes", "response_policy:all_succeeded"])
    .data(Scope::Node, node::config_set)
    .docs("server", "2.0.0", "Changes parameters"),
];

static MEMORY: [Command; 2] = [
    command("memory|help", 2, LOADING | STALE, &["@slow"])
        .data(Scope::Connection, introspection::memory_help)
        .docs("server", "4.0.0", "Lists the subcommands"),
    command("memory|usage", -3, READONLY, &["@read", "@slow"])
        .keys((2, 2, 1), &[RO_2])
        .data(Scope::Keys, introspection::memory_usage)
        .docs("server", "4.0.0", "Estimates the memory a key takes"),
];

static SLOWLOG: [Command; 4] = [
    command("slowlog|get", -2, ADMIN | LOADING | STALE, &["@admin", "@slow", "@dangerous"])
        .tips(&["request_policy:all_nodes", "nondeterministic_output"])
        .data(Scope::Connection, slow::slowlog_get)
        .docs("server", "2.2.12", "Returns the newest slow commands"),
    command("slowlog|help", 2, LOADING | STALE, &["@slow"])
        .data(Scope::Connection, slow::slowlog_help)
        .docs("server", "6.2.0", "Lists the subcommands"),
    command("slowlog|len", 2, ADMIN | LOADING | STALE, &["@admin", "@slow", "@dangerous"])
        .tips(&["request_policy:all_nodes", "response_policy:agg_sum", "nondeterministic_output"])
        .data(Scope::Connection, slow::slowlog_len)
        .docs("server", "2.2.12", "Counts the slow commands kept"),
    command("slowlog|reset", 2, ADMIN | LOADING | STALE, &["@admin", "@slow", "@dangerous"])
        .tips(&["request_policy:all_nodes", "response_policy:all_succeeded"])
        .data(Scope::Connection, slow::slowlog_reset)
        .docs("server", "2.2.12", "Forgets the slow commands"),
];

static LATENCY: [Command; 2] = [
    command("latency|help", 2, LOADING | STALE, &["@slow"])
        .data(Scope::Connection, slow::latency_help)
        .docs("server", "2.8.13", "Lists the subcommands"),
    command(
        "latency|histogram",
        -2,
        ADMIN | NOSCRIPT | LOADING | STALE,
        &["@admin", "@slow", "@dangerous"],
    )
    .tips(&["nondeterministic_output", "request_policy:all_nodes", "response_policy:special"])
    .data(Scope::Connection, slow::latency_histogram)
    .docs("server", "7.0.0", "Returns how long commands took"),
];

static OBJECT: [Command; 5] = [
    command("object|encoding", 3, READONLY, &["@keyspace", "@read", "@slow"])
        .keys((2, 2, 1), &[RO_2])
        .tips(&["nondeterministic_output"])
        .data(Scope::Keys, introspection::object_encoding)
        .docs("generic", "2.2.3", "Returns how a value is held"),
    command("object|freq", 3, READONLY, &["@keyspace", "@read", "@slow"])
        .keys((2, 2, 1), &[RO_2])
        .tips(&["nondeterministic_output"])
        .data(Scope::Keys, introspection::object_freq)
        .docs("generic", "4.0.0", "Returns how often a key is used"),
    command("object|help", 2, LOADING | STALE, &["@keyspace", "@slow"])
        .data(Scope::Connection, introspection::object_help)
        .docs("generic", "6.2.0", "Lists the subcommands"),
    command("object|idletime", 3, READONLY, &["@keyspace", "@read", "@slow"])
        .keys((2, 2, 1), &[RO_2])
        .tips(&["nondeterministic_output"])
        .data(Scope::Keys, introspection::object_idletime)
        .docs("generic", "2.2.3", "Returns how long a key was not used"),
    command("object|refcount", 3, READONLY, &["@keyspace", "@read", "@slow"])
        .keys((2, 2, 1), &[RO_2])
        .tips(&["nondeterministic_output"])
        .data(Scope::Keys, introspection::object_refcount)
        .docs("generic", "2.2.3", "Returns how many references a value has"),
];

/// Every command, in alphabetical order.
pub static COMMANDS: [Command; 98] = [
    command("append", 3, WRITE | DENYOOM | FAST, &["@write", "@string", "@fast"])
        .keys((1, 1, 1), &[RW_INSERT_1])
        .data(Scope::Keys, strings::append)
        .docs("string", "2.0.0", "Appends to a string, creating it if needed"),
    command(
        "auth",
        -2,
        NOSCRIPT | LOADING | STALE | FAST | NO_AUTH | ALLOW_BUSY,
        &["@fast", "@connection"],
    )
    .session(Scope::Connection, connection::auth)
    .docs("connection", "1.0.0", "Authenticates the connection"),
    command("bgsave", -1, ADMIN | NOSCRIPT | NO_ASYNC_LOADING, &["@admin", "@slow", "@dangerous"])
        .data(Scope::Node, node::bgsave)
        .docs("server", "1.0.0", "Writes a snapshot in the background"),
    command("client", -2, NO_FLAGS, &["@slow"]).subcommands(&CLIENT).docs(
        "connection",
        "2.4.0",
        "Commands about client connections",
    ),
    command("command", -1, LOADING | STALE, &["@slow", "@connection"])
        .tips(&["nondeterministic_output_order"])
        .data(Scope::Connection, introspection::command)
        .subcommands(&COMMAND)
        .docs("server", "2.8.13", "Describes every command"),
    command("config", -2, NO_FLAGS, &["@slow"]).subcommands(&CONFIG).docs(
        "server",
        "2.0.0",
        "Reads and changes the configuration",
    ),
    command("copy", -3, WRITE | DENYOOM, &["@keyspace", "@write", "@slow"])
        .keys((1, 2, 1), &[RO_ACCESS_1, OW_UPDATE_2])
        .data(Scope::Databases, keys::copy)
        .docs("generic", "6.2.0", "Copies a value to another key"),
    command("dbsize", 1, READONLY | FAST, &["@keyspace", "@read", "@fast"])
        .tips(&["request_policy:all_shards", "response_policy:agg_sum"])
        .data(Scope::Everything, keyspace_wide::dbsize)
        .docs("server", "1.0.0", "Counts the keys of the database"),
    command("decr", 2, WRITE | DENYOOM | FAST, &["@write", "@string", "@fast"])
        .keys((1, 1, 1), &[RW_ACCESS_UPDATE_1])
        .data(Scope::Keys, strings::decr)
        .docs("string", "1.0.0", "Subtracts one from an integer"),
    command("decrby", 3, WRITE | DENYOOM | FAST, &["@write", "@string", "@fast"])
        .keys((1, 1, 1), &[RW_ACCESS_UPDATE_1])
        .data(Scope::Keys, strings::decrby)
        .docs("string", "1.0.0", "Subtracts from an integer"),
    command("del", -2, WRITE, &["@keyspace", "@write", "@slow"])
        .keys((1, -1, 1), &[RM_DELETE_1_ON])
        .tips(&["request_policy:multi_shard", "response_policy:agg_sum"])
        .data(Scope::Keys, keys::del)
        .docs("generic", "1.0.0", "Removes keys"),
    direct::ADD,
    direct::CAS,
    direct::DEL,
    direct::FILTER,
    direct::GET,
    direct::PUT,
    direct::REDUCE,
    direct::VADD,
    command(
        "discard",
        1,
        NOSCRIPT | LOADING | STALE | FAST | ALLOW_BUSY,
        &["@fast", "@transaction"],
    )
    .session(Scope::Transaction, transactions::discard)
    .docs("transactions", "2.0.0", "Forgets a transaction"),
    command("echo", 2, LOADING | STALE | FAST, &["@fast", "@connection"])
        .session(Scope::Connection, connection::echo)
        .docs("connection", "1.0.0", "Returns its argument"),
    command("exec", 1, NOSCRIPT | LOADING | STALE | SKIP_SLOWLOG, &["@slow", "@transaction"])
        .session(Scope::Transaction, transactions::exec)
        .docs("transactions", "1.2.0", "Runs a transaction"),
    command("exists", -2, READONLY | FAST, &["@keyspace", "@read", "@fast"])
        .keys((1, -1, 1), &[RO_1_ON])
        .tips(&["request_policy:multi_shard", "response_policy:agg_sum"])
        .data(Scope::Keys, keys::exists)
        .docs("generic", "1.0.0", "Counts how many of the keys exist"),
    command("expire", -3, WRITE | FAST, &["@keyspace", "@write", "@fast"])
        .keys((1, 1, 1), &[RW_UPDATE_1])
        .data(Scope::Keys, expiry::expire)
        .docs("generic", "1.0.0", "Sets a time to live in seconds"),
    command("expireat", -3, WRITE | FAST, &["@keyspace", "@write", "@fast"])
        .keys((1, 1, 1), &[RW_UPDATE_1])
        .data(Scope::Keys, expiry::expireat)
        .docs("generic", "1.2.0", "Sets the time of expiry in Unix seconds"),
    command("expiretime", 2, READONLY | FAST, &["@keyspace", "@read", "@fast"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .data(Scope::Keys, expiry::expiretime)
        .docs("generic", "7.0.0", "Returns the time of expiry in Unix seconds"),
    command("flushall", -1, WRITE, &["@keyspace", "@write", "@slow", "@dangerous"])
        .tips(&["request_policy:all_shards", "response_policy:all_succeeded"])
        .data(Scope::Everything, keyspace_wide::flushall)
        .docs("server", "1.0.0", "Removes all keys of all databases"),
    command("flushdb", -1, WRITE, &["@keyspace", "@write", "@slow", "@dangerous"])
        .tips(&["request_policy:all_shards", "response_policy:all_succeeded"])
        .data(Scope::Everything, keyspace_wide::flushdb)
        .docs("server", "1.0.0", "Removes all keys of the database"),
    command("get", 2, READONLY | FAST, &["@read", "@string", "@fast"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .data(Scope::Keys, strings::get)
        .docs("string", "1.0.0", "Returns a string"),
    command("getdel", 2, WRITE | FAST, &["@write", "@string", "@fast"])
        .keys((1, 1, 1), &[RW_ACCESS_DELETE_1])
        .data(Scope::Keys, strings::getdel)
        .docs("string", "6.2.0", "Returns a string and removes it"),
    command("getex", -2, WRITE | FAST, &["@write", "@string", "@fast"])
        .keys((1, 1, 1), &[GETEX_KEY])
        .data(Scope::Keys, strings::getex)
        .docs("string", "6.2.0", "Returns a string and changes its expiry"),
    command("getrange", 4, READONLY, &["@read", "@string", "@slow"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .data(Scope::Keys, strings::getrange)
        .docs("string", "2.4.0", "Returns part of a string"),
    command("getset", 3, WRITE | DENYOOM | FAST, &["@write", "@string", "@fast"])
        .keys((1, 1, 1), &[RW_ACCESS_UPDATE_1])
        .data(Scope::Keys, strings::getset)
        .docs("string", "1.0.0", "Stores a string and returns the old one"),
    command("hdel", -3, WRITE | FAST, &["@write", "@hash", "@fast"])
        .keys((1, 1, 1), &[RW_DELETE_1])
        .data(Scope::Keys, hashes::hdel)
        .docs("hash", "2.0.0", "Removes fields of a hash"),
    command(
        "hello",
        -1,
        NOSCRIPT | LOADING | STALE | FAST | NO_AUTH | ALLOW_BUSY,
        &["@fast", "@connection"],
    )
    .session(Scope::Connection, connection::hello)
    .docs("connection", "6.0.0", "Chooses the protocol version"),
    command("hexists", 3, READONLY | FAST, &["@read", "@hash", "@fast"])
        .keys((1, 1, 1), &[RO_1])
        .data(Scope::Keys, hashes::hexists)
        .docs("hash", "2.0.0", "Says whether a field is there"),
    command("hget", 3, READONLY | FAST, &["@read", "@hash", "@fast"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .data(Scope::Keys, hashes::hget)
        .docs("hash", "2.0.0", "Returns the value of a field"),
    command("hgetall", 2, READONLY, &["@read", "@hash", "@slow"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .tips(&["nondeterministic_output_order"])
        .data(Scope::Keys, hashes::hgetall)
        .docs("hash", "2.0.0", "Returns all fields and values"),
    command("hincrby", 4, WRITE | DENYOOM | FAST, &["@write", "@hash", "@fast"])
        .keys((1, 1, 1), &[RW_ACCESS_UPDATE_1])
        .data(Scope::Keys, hashes::hincrby)
        .docs("hash", "2.0.0", "Adds an integer to a field"),
    command("hincrbyfloat", 4, WRITE | DENYOOM | FAST, &["@write", "@hash", "@fast"])
        .keys((1, 1, 1), &[RW_ACCESS_UPDATE_1])
        .data(Scope::Keys, hashes::hincrbyfloat)
        .docs("hash", "2.6.0", "Adds a number to a field"),
    command("hkeys", 2, READONLY, &["@read", "@hash", "@slow"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .tips(&["nondeterministic_output_order"])
        .data(Scope::Keys, hashes::hkeys)
        .docs("hash", "2.0.0", "Returns all fields"),
    command("hlen", 2, READONLY | FAST, &["@read", "@hash", "@fast"])
        .keys((1, 1, 1), &[RO_1])
        .data(Scope::Keys, hashes::hlen)
        .docs("hash", "2.0.0", "Returns the number of fields"),
    command("hmget", -3, READONLY | FAST, &["@read", "@hash", "@fast"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .data(Scope::Keys, hashes::hmget)
        .docs("hash", "2.0.0", "Returns the values of fields"),
    command("hmset", -4, WRITE | DENYOOM | FAST, &["@write", "@hash", "@fast"])
        .keys((1, 1, 1), &[RW_UPDATE_1])
        .data(Scope::Keys, hashes::hmset)
        .docs("hash", "2.0.0", "Sets fields"),
    command("hrandfield", -2, READONLY, &["@read", "@hash", "@slow"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .tips(&["nondeterministic_output"])
        .data(Scope::Keys, hashes::hrandfield)
        .docs("hash", "6.2.0", "Returns random fields"),
    command("hscan", -3, READONLY, &["@read", "@hash", "@slow"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .tips(&["nondeterministic_output"])
        .data(Scope::Keys, hashes::hscan)
        .docs("hash", "2.8.0", "Visits fields and values piece by piece"),
    command("hset", -4, WRITE | DENYOOM | FAST, &["@write", "@hash", "@fast"])
        .keys((1, 1, 1), &[RW_UPDATE_1])
        .data(Scope::Keys, hashes::hset)
        .docs("hash", "2.0.0", "Sets fields"),
    command("hsetnx", 4, WRITE | DENYOOM | FAST, &["@write", "@hash", "@fast"])
        .keys((1, 1, 1), &[RW_INSERT_1])
        .data(Scope::Keys, hashes::hsetnx)
        .docs("hash", "2.0.0", "Sets a field that is not there"),
    command("hstrlen", 3, READONLY | FAST, &["@read", "@hash", "@fast"])
        .keys((1, 1, 1), &[RO_1])
        .data(Scope::Keys, hashes::hstrlen)
        .docs("hash", "3.2.0", "Returns the length of a field's value"),
    command("hvals", 2, READONLY, &["@read", "@hash", "@slow"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .tips(&["nondeterministic_output_order"])
        .data(Scope::Keys, hashes::hvals)
        .docs("hash", "2.0.0", "Returns all values"),
    command("incr", 2, WRITE | DENYOOM | FAST, &["@write", "@string", "@fast"])
        .keys((1, 1, 1), &[RW_ACCESS_UPDATE_1])
        .data(Scope::Keys, strings::incr)
        .docs("string", "1.0.0", "Adds one to an integer"),
    command("incrby", 3, WRITE | DENYOOM | FAST, &["@write", "@string", "@fast"])
        .keys((1, 1, 1), &[RW_ACCESS_UPDATE_1])
        .data(Scope::Keys, strings::incrby)
        .docs("string", "1.0.0", "Adds to an integer"),
    command("incrbyfloat", 3, WRITE | DENYOOM | FAST, &["@write", "@string", "@fast"])
        .keys((1, 1, 1), &[RW_ACCESS_UPDATE_1])
        .data(Scope::Keys, strings::incrbyfloat)
        .docs("string", "2.6.0", "Adds to a floating-point number"),
    command("info", -1, LOADING | STALE, &["@slow", "@dangerous"])
        .tips(&["nondeterministic_output", "request_policy:all_shards", "response_policy:special"])
        .data(Scope::Node, node::info)
        .docs("server", "1.0.0", "Returns facts and figures of the node"),
    command("keys", 2, READONLY, &["@keyspace", "@read", "@slow", "@dangerous"])
        .tips(&["request_policy:all_shards", "nondeterministic_output_order"])
        .data(Scope::Everything, keyspace_wide::keys)
        .docs("generic", "1.0.0", "Returns the keys that match a pattern"),
    // Not Redis'.
    command("kv.changes", -2, ADMIN | NOSCRIPT | NO_MULTI, &["@admin", "@slow", "@dangerous"])
        .tips(&["nondeterministic_output"])
        .data(Scope::Connection, node::kv_changes)
        .docs("server", "7.2.0", "Returns the changes behind a position of the change feed"),
    command("lastsave", 1, LOADING | STALE | FAST, &["@admin", "@fast", "@dangerous"])
        .tips(&["nondeterministic_output"])
        .data(Scope::Node, node::lastsave)
        .docs("server", "1.0.0", "Returns the time of the latest snapshot"),
    command("latency", -2, NO_FLAGS, &["@slow"]).subcommands(&LATENCY).docs(
        "server",
        "2.8.13",
        "Tells how long commands took",
    ),
    command("memory", -2, NO_FLAGS, &["@slow"]).subcommands(&MEMORY).docs(
        "server",
        "4.0.0",
        "Commands about memory",
    ),
    command("mget", -2, READONLY | FAST, &["@read", "@string", "@fast"])
        .keys((1, -1, 1), &[RO_ACCESS_1_ON])
        .tips(&["request_policy:multi_shard"])
        .data(Scope::Keys, strings::mget)
        .docs("string", "1.0.0", "Returns several strings"),
    command("move", 3, WRITE | FAST, &["@keyspace", "@write", "@fast"])
        .keys((1, 1, 1), &[RW_ACCESS_UPDATE_1])
        .data(Scope::Databases, keys::move_key)
        .docs("generic", "1.0.0", "Moves a key to another database"),
    command("mset", -3, WRITE | DENYOOM, &["@write", "@string", "@slow"])
        .keys((1, -1, 2), &[OW_UPDATE_1_ON_PAIRS])
        .tips(&["request_policy:multi_shard", "response_policy:all_succeeded"])
        .data(Scope::Keys, strings::mset)
        .docs("string", "1.0.1", "Stores several strings at once"),
    command("msetex", -4, WRITE | DENYOOM, &["@write", "@string", "@slow"])
        .counted(&[OW_UPDATE_COUNTED_1_PAIRS])
        .tips(&["request_policy:multi_shard", "response_policy:agg_min"])
        .data(Scope::Keys, strings::msetex)
        .docs("string", "8.4.0", "Stores several strings with one time of expiry"),
    command("msetnx", -3, WRITE | DENYOOM, &["@write", "@string", "@slow"])
        .keys((1, -1, 2), &[OW_INSERT_1_ON_PAIRS])
        .tips(&["request_policy:multi_shard", "response_policy:agg_min"])
        .data(Scope::Keys, strings::msetnx)
        .docs("string", "1.0.1", "Stores several strings if none of them exists"),
    command("multi", 1, NOSCRIPT | LOADING | STALE | FAST | ALLOW_BUSY, &["@fast", "@transaction"])
        .session(Scope::Transaction, transactions::multi)
        .docs("transactions", "1.2.0", "Begins a transaction"),
    command("object", -2, NO_FLAGS, &["@slow"]).subcommands(&OBJECT).docs(
        "generic",
        "2.2.3",
        "Commands about how values are held",
    ),
    command("persist", 2, WRITE | FAST, &["@keyspace", "@write", "@fast"])
        .keys((1, 1, 1), &[RW_UPDATE_1])
        .data(Scope::Keys, expiry::persist)
        .docs("generic", "2.2.0", "Removes the expiry of a key"),
    command("pexpire", -3, WRITE | FAST, &["@keyspace", "@write", "@fast"])
        .keys((1, 1, 1), &[RW_UPDATE_1])
        .data(Scope::Keys, expiry::pexpire)
        .docs("generic", "2.6.0", "Sets a time to live in milliseconds"),
    command("pexpireat", -3, WRITE | FAST, &["@keyspace", "@write", "@fast"])
        .keys((1, 1, 1), &[RW_UPDATE_1])
        .data(Scope::Keys, expiry::pexpireat)
        .docs("generic", "2.6.0", "Sets the time of expiry in Unix milliseconds"),
    command("pexpiretime", 2, READONLY | FAST, &["@keyspace", "@read", "@fast"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .data(Scope::Keys, expiry::pexpiretime)
        .docs("generic", "7.0.0", "Returns the time of expiry in Unix milliseconds"),
    command("ping", -1, FAST, &["@fast", "@connection"])
        .tips(&["request_policy:all_shards", "response_policy:all_succeeded"])
        .session(Scope::Connection, connection::ping)
        .docs("connection", "1.0.0", "Shows that the node answers"),
    command("psetex", 4, WRITE | DENYOOM, &["@write", "@string", "@slow"])
        .keys((1, 1, 1), &[OW_UPDATE_1])
        .data(Scope::Keys, strings::psetex)
        .docs("string", "2.6.0", "Stores a string with a time to live in milliseconds"),
    command("pttl", 2, READONLY | FAST, &["@keyspace", "@read", "@fast"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .tips(&["nondeterministic_output"])
        .data(Scope::Keys, expiry::pttl)
        .docs("generic", "2.6.0", "Returns the time to live in milliseconds"),
    command(
        "quit",
        -1,
        NOSCRIPT | LOADING | STALE | FAST | NO_AUTH | ALLOW_BUSY,
        &["@fast", "@connection"],
    )
    .session(Scope::Connection, connection::quit)
    .docs("connection", "1.0.0", "Closes the connection"),
    command("randomkey", 1, READONLY, &["@keyspace", "@read", "@slow"])
        .tips(&["request_policy:all_shards", "nondeterministic_output"])
        .data(Scope::Everything, keyspace_wide::randomkey)
        .docs("generic", "1.0.0", "Returns some key"),
    command("readonly", 1, LOADING | STALE | FAST, &["@fast", "@connection"])
        .session(Scope::Connection, connection::readonly)
        .docs("cluster", "3.0.0", "Lets this connection read what a replica holds, old or not"),
    command("readwrite", 1, LOADING | STALE | FAST, &["@fast", "@connection"])
        .session(Scope::Connection, connection::readwrite)
        .docs("cluster", "3.0.0", "Ends READONLY"),
    command("rename", 3, WRITE, &["@keyspace", "@write", "@slow"])
        .keys((1, 2, 1), &[RW_ACCESS_DELETE_1, OW_UPDATE_2])
        .data(Scope::Keys, keys::rename)
        .docs("generic", "1.0.0", "Renames a key"),
    command("renamenx", 3, WRITE | FAST, &["@keyspace", "@write", "@fast"])
        .keys((1, 2, 1), &[RW_ACCESS_DELETE_1, OW_INSERT_2])
        .data(Scope::Keys, keys::renamenx)
        .docs("generic", "1.0.0", "Renames a key if the new name is free"),
    command(
        "reset",
        1,
        NOSCRIPT | LOADING | STALE | FAST | NO_AUTH | ALLOW_BUSY,
        &["@fast", "@connection"],
    )
    .session(Scope::Connection, connection::reset)
    .docs("connection", "6.2.0", "Returns the connection to its first state"),
    command(
        "save",
        1,
        ADMIN | NOSCRIPT | NO_ASYNC_LOADING | NO_MULTI,
        &["@admin", "@slow", "@dangerous"],
    )
    .data(Scope::Node, node::save)
    .docs("server", "1.0.0", "Writes a snapshot and waits for it"),
    command("scan", -2, READONLY, &["@keyspace", "@read", "@slow"])
        .tips(&["nondeterministic_output", "request_policy:special"])
        .data(Scope::Scan, keyspace_wide::scan)
        .docs("generic", "2.8.0", "Iterates over the keys"),
    command("select", 2, LOADING | STALE | FAST, &["@fast", "@connection"])
        .session(Scope::Connection, connection::select)
        .docs("connection", "1.0.0", "Chooses the database"),
    command("set", -3, WRITE | DENYOOM, &["@write", "@string", "@slow"])
        .keys((1, 1, 1), &[SET_KEY])
        .data(Scope::Keys, strings::set)
        .docs("string", "1.0.0", "Stores a string"),
    command("setex", 4, WRITE | DENYOOM, &["@write", "@string", "@slow"])
        .keys((1, 1, 1), &[OW_UPDATE_1])
        .data(Scope::Keys, strings::setex)
        .docs("string", "2.0.0", "Stores a string with a time to live in seconds"),
    command("setnx", 3, WRITE | DENYOOM | FAST, &["@write", "@string", "@fast"])
        .keys((1, 1, 1), &[OW_INSERT_1])
        .data(Scope::Keys, strings::setnx)
        .docs("string", "1.0.0", "Stores a string if the key is free"),
    command("setrange", 4, WRITE | DENYOOM, &["@write", "@string", "@slow"])
        .keys((1, 1, 1), &[RW_UPDATE_1])
        .data(Scope::Keys, strings::setrange)
        .docs("string", "2.2.0", "Overwrites part of a string"),
    command(
        "shutdown",
        -1,
        ADMIN | NOSCRIPT | LOADING | STALE | NO_MULTI | ALLOW_BUSY,
        &["@admin", "@slow", "@dangerous"],
    )
    .data(Scope::Node, node::shutdown)
    .docs("server", "1.0.0", "Stops the node"),
    command("slowlog", -2, NO_FLAGS, &["@slow"]).subcommands(&SLOWLOG).docs(
        "server",
        "2.2.12",
        "Reads the log of slow commands",
    ),
    command("strlen", 2, READONLY | FAST, &["@read", "@string", "@fast"])
        .keys((1, 1, 1), &[RO_1])
        .data(Scope::Keys, strings::strlen)
        .docs("string", "2.2.0", "Returns the length of a string"),
    command("substr", 4, READONLY, &["@read", "@string", "@slow"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .data(Scope::Keys, strings::getrange)
        .docs("string", "1.0.0", "Returns part of a string; the old name of GETRANGE"),
    command("time", 1, LOADING | STALE | FAST, &["@fast"])
        .tips(&["nondeterministic_output"])
        .data(Scope::Node, node::time)
        .docs("server", "2.6.0", "Returns the time of the node"),
    command("touch", -2, READONLY | FAST, &["@keyspace", "@read", "@fast"])
        .keys((1, -1, 1), &[RO_1_ON])
        .tips(&["request_policy:multi_shard", "response_policy:agg_sum"])
        .data(Scope::Keys, keys::touch)
        .docs("generic", "3.2.1", "Counts the keys that exist and marks them used"),
    command("ttl", 2, READONLY | FAST, &["@keyspace", "@read", "@fast"])
        .keys((1, 1, 1), &[RO_ACCESS_1])
        .tips(&["nondeterministic_output"])
        .data(Scope::Keys, expiry::ttl)
        .docs("generic", "1.0.0", "Returns the time to live in seconds"),
    command("type", 2, READONLY | FAST, &["@keyspace", "@read", "@fast"])
        .keys((1, 1, 1), &[RO_1])
        .data(Scope::Keys, keys::type_of)
        .docs("generic", "1.0.0", "Returns the type of a value"),
    command("unlink", -2, WRITE | FAST, &["@keyspace", "@write", "@fast"])
        .keys((1, -1, 1), &[RM_DELETE_1_ON])
        .tips(&["request_policy:multi_shard", "response_policy:agg_sum"])
        .data(Scope::Keys, keys::del)
        .docs("generic", "4.0.0", "Removes keys"),
    command(
        "unwatch",
        1,
        NOSCRIPT | LOADING | STALE | FAST | ALLOW_BUSY,
        &["@fast", "@transaction"],
    )
    .session(Scope::Connection, transactions::unwatch)
    .docs("transactions", "2.2.0", "Forgets the watched keys"),
    command(
        "watch",
        -2,
        NOSCRIPT | LOADING | STALE | FAST | ALLOW_BUSY,
        &["@fast", "@transaction"],
    )
    .keys((1, -1, 1), &[RO_1_ON])
    .session(Scope::Watch, transactions::watch)
    .docs(
        "transactions",
        "2.2.0",
        "Makes the next transaction depend on keys staying as they are",
    ),
];
