//! Hashes through the log: three members, one of which dies in the middle, against a model.
//!
//! One client writes at a member that lives on; a command whose answer says that it may have taken
//! effect is looked up. At the end all members have the model's contents, and none was told to differ.

use std::collections::BTreeMap;

use beeline_env::Randomness;
use beeline_verify_clients::{Reply, eventually};

use super::members::{Cluster, PATIENCE, ask};

type Row = BTreeMap<String, String>;

/// What all members shall have.
#[derive(Clone, Debug, Default)]
struct Model(BTreeMap<String, Row>);

impl Model {
    fn row(&mut self, key: &str) -> &mut Row {
        self.0.entry(key.to_owned()).or_default()
    }

    fn set(&mut self, key: &str, field: &str, value: String) {
        self.row(key).insert(field.to_owned(), value);
    }

    fn increment(&mut self, key: &str, field: &str, by: i64) {
        let row = self.row(key);
        let before: i64 = row.get(field).map_or(0, |value| value.parse().unwrap());
        row.insert(field.to_owned(), (before + by).to_string());
    }

    fn remove(&mut self, key: &str, field: &str) {
        self.row(key).remove(field);
        self.0.retain(|_, row| !row.is_empty());
    }
}

fn fields(reply: &Reply) -> Row {
    let Reply::Array(parts) = reply else { panic!("{reply:?}") };
    parts.chunks_exact(2).map(|pair| (pair[0].text(), pair[1].text())).collect()
}

fn words(command: &str) -> Vec<&str> {
    command.split(' ').collect()
}

/// One step: the commands (several: a transaction), and what they do.
fn step(random: &mut Randomness, model: &mut Model) -> Vec<String> {
    let key = format!("h{}", random.below(6));
    let mut field = || format!("f{}", random.below(30));
    let (one, other) = (field(), field());
    let value = format!("v{}", random.below(1_000_000));
    // Numbers have fields of their own.
    let count = format!("n{}", random.below(4));
    match random.below(12) {
        0..=3 => {
            model.set(&key, &one, value.clone());
            model.set(&key, &other, value.clone());
            vec![format!("HSET {key} {one} {value} {other} {value}")]
        }
        4..=6 => {
            model.increment(&key, &count, 3);
            vec![format!("HINCRBY {key} {count} 3")]
        }
        7 | 8 => {
            model.remove(&key, &one);
            vec![format!("HDEL {key} {one}")]
        }
        9 => {
            // Ends the row, and another of its name begins.
            model.0.remove(&key);
            model.set(&key, &one, value.clone());
            vec![format!("DEL {key}"), format!("HSET {key} {one} {value}")]
        }
        10 => vec![format!("EXPIRE {key} 100000")],
        _ => {
            model.set(&key, &one, value.clone());
            model.increment(&key, &count, -1);
            model.remove(&key, &other);
            vec![
                format!("HSET {key} {one} {value}"),
                format!("HINCRBY {key} {count} -1"),
                format!("HGETALL {key}"),
                format!("HDEL {key} {other}"),
            ]
        }
    }
}

fn contents(cluster: &Cluster, member: usize) -> BTreeMap<String, Row> {
    let mut all = BTreeMap::new();
    for key in (0..6).map(|key| format!("h{key}")) {
        let row = fields(&cluster.ask(member, &["HGETALL", &key]));
        if !row.is_empty() {
            let length = cluster.ask(member, &["HLEN", &key]);
            assert_eq!(length, Reply::Integer(row.len() as i64), "{key} at {member}");
            all.insert(key, row);
        }
    }
    all
}

/// Has a step done, once, by a client that may be told that its outcome is not known.
fn carry(cluster: &Cluster, member: usize, commands: &[String], before: &Model, after: &Model) {
    let mut client = cluster.client(member);
    let mut refusal = None;
    let single = commands.len() == 1;
    if !single {
        assert!(ask(&mut client, &["MULTI"]).is_ok());
    }
    for command in commands {
        let reply = ask(&mut client, &words(command));
        if let (true, Reply::Error(line)) = (single, reply) {
            refusal = Some(line);
        }
    }
    if !single && let Reply::Error(line) = ask(&mut client, &["EXEC"]) {
        refusal = Some(line);
    }
    let Some(refusal) = refusal else { return };
    assert!(refusal.starts_with("TRYAGAIN") || refusal.starts_with("CLUSTERDOWN"), "{refusal}");
    let now = contents(cluster, member);
    if now != after.0 {
        assert_eq!(now, before.0, "{commands:?}: {refusal}");
        carry(cluster, member, commands, before, after);
    }
}

#[test]
fn hashes_are_alike_at_all_members_although_the_leader_dies_in_the_middle() {
    let mut cluster = Cluster::new(0, &[]);
    let (mut random, mut model) = (Randomness::new(31), Model::default());
    let dies = cluster.leader();
    let writes_at = (dies + 1) % 3;
    for turn in 0..600 {
        match turn {
            200 => cluster.kill(dies),
            400 => cluster.start(dies),
            _ => {}
        }
        let before = model.clone();
        let commands = step(&mut random, &mut model);
        carry(&cluster, writes_at, &commands, &before, &model);
    }
    // A row whose time is up is gone everywhere, with all of its fields.
    let gone = model.0.keys().next().unwrap().clone();
    cluster.ask(writes_at, &["PEXPIRE", &gone, "1"]);
    model.0.remove(&gone);
    for member in 0..3 {
        eventually("the row's time is up", PATIENCE, || {
            (cluster.ask(member, &["EXISTS", &gone]) == Reply::Integer(0)).then_some(())
        });
        assert_eq!(contents(&cluster, member), model.0, "member {member}");
        assert_eq!(cluster.info(member, "log_divergences"), "0", "{}", cluster.described());
        let timed = |member: usize| {
            let left = |key: &String| cluster.ask(member, &["TTL", key]) != Reply::Integer(-1);
            model.0.keys().filter(|key| left(key)).cloned().collect::<Vec<_>>()
        };
        assert_eq!(timed(member), timed(writes_at), "expiry is a row's");
    }
}
