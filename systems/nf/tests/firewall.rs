//! The firewall against a linear search: random rules and packets, changes under traffic, full
//! tables, packets that are no packets.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use std::collections::BTreeSet;

use beeline_ir::run::{Machine, Run};
use beeline_nf::functions::Manager;
use beeline_nf::functions::firewall::{Firewall, FirewallError};
use beeline_nf::functions::rules::{Key, Rule};
use beeline_nf::functions::tables::Write;
use beeline_nf::functions::templates;
use common::{Dice, compiled, native, number, packet, play};

/// The template with tables so small that every one of them fills.
fn small() -> String {
    templates::text("firewall")
        .unwrap()
        .replace("(BITS = 16)", "(BITS = 5)")
        .replace("(TABLES = 16, BITS = 10)", "(TABLES = 4, BITS = 5)")
        .replace("(WORDS = 4)", "(WORDS = 2)")
        .replace("(LEVELS = 12)", "(LEVELS = 5)")
}

const ADDRESSES: [&str; 6] =
    ["10.0.0.1", "10.0.0.2", "10.0.1.3", "10.1.2.3", "192.168.0.1", "255.255.255.255"];
const PORTS: [u16; 6] = [0, 53, 80, 443, 1_023, 65_535];

fn random_rule(dice: &mut Dice) -> Rule {
    let address = |dice: &mut Dice| match dice.below(4) {
        0 => "any".to_owned(),
        1 => dice.of(&ADDRESSES).to_owned(),
        _ => format!("{}/{}", dice.of(&ADDRESSES), dice.of(&[8, 16, 24, 31])),
    };
    let action = dice.of(&["drop", "pass"]);
    let text = match dice.below(8) {
        // A whole key.
        0..3 => format!(
            "{} {} :{} -> {} :{} {action}",
            dice.of(&["tcp", "udp"]),
            dice.of(&ADDRESSES),
            dice.of(&PORTS),
            dice.of(&ADDRESSES),
            dice.of(&PORTS)
        ),
        // A destination.
        3 => format!("ip any -> {} {action}", address(dice)),
        4 => format!(
            "{} {} -> any :{} {action}",
            dice.of(&["tcp", "ip"]),
            address(dice),
            dice.of(&PORTS)
        ),
        5 => format!(
            "tcp any -> any :{}-{} {action}",
            dice.of(&[0, 50, 80]),
            dice.of(&[80, 500, 443])
        ),
        _ => format!(
            "{} {} -> {} {action}",
            dice.of(&["tcp", "udp", "icmp"]),
            address(dice),
            address(dice)
        ),
    };
    text.parse().unwrap()
}

fn random_key(dice: &mut Dice) -> Key {
    let address = |dice: &mut Dice| {
        let near: std::net::Ipv4Addr = dice.of(&ADDRESSES).parse().unwrap();
        u32::from(near) ^ if dice.below(3) == 0 { 1 << dice.below(32) } else { 0 }
    };
    let port = |dice: &mut Dice| u32::from(dice.of(&PORTS)) ^ u32::from(dice.below(8) == 0);
    let protocol = dice.of(&[6, 6, 17, 1]);
    let ports = if protocol == 1 { 0 } else { port(dice) << 16 | port(dice) };
    Key { source: address(dice), destination: address(dice), ports, protocol }
}

fn apply<M: Machine>(run: &mut Run<'_, M>, writes: &mut Vec<Write>) {
    for (node, signal) in writes.drain(..) {
        run.signal_now(node, signal).unwrap();
    }
}

/// Packets that come out, by their numbers.
fn passed<M: Machine>(
    graph: &beeline_ir::graph::Graph,
    run: &mut Run<'_, M>,
    keys: &[Key],
) -> BTreeSet<u32> {
    let packets: Vec<(u64, Vec<u8>)> =
        (0..).zip(keys).map(|(at, key)| (0, packet(*key, 0, at))).collect();
    play(graph, run, &packets).remove(0).iter().map(|bytes| number(bytes)).collect()
}

fn expected(firewall: &Firewall, keys: &[Key]) -> BTreeSet<u32> {
    let stays = |key: &Key| firewall.linear(*key).is_none_or(|(_, drop)| !drop);
    (0..).zip(keys).filter(|(_, key)| stays(key)).map(|(at, _)| at).collect()
}

#[test]
fn random_rules_decide_as_a_linear_search_and_full_tables_say_so() {
    let loaded = compiled(&small());
    let graph = &loaded.compiled.graph;
    let mut refused = 0;
    let mut compared = 0;
    for seed in 1..=2_u64 {
        let mut dice = Dice(seed * 0x9e37_79b9);
        let mut run = native(graph);
        let mut firewall = Firewall::of(graph).unwrap();
        let mut writes = Vec::new();
        for round in 0..60 {
            for _ in 0..5 {
                let rules = firewall.rules();
                if !rules.is_empty() && dice.below(4) == 0 {
                    let at = usize::try_from(dice.below(rules.len() as u64)).unwrap();
                    firewall.remove(rules[at].0, &mut writes).unwrap();
                } else {
                    let rule = random_rule(&mut dice);
                    match firewall.add(rule, dice.below(3) == 0, &mut writes) {
                        Ok(_) => {}
                        Err(FirewallError::Full { .. }) => refused += 1,
                        Err(other) => panic!("{other}"),
                    }
                    assert!(firewall.rules().len() <= rules.len() + 1);
                }
                apply(&mut run, &mut writes);
            }
            let keys: Vec<Key> = (0..200).map(|_| random_key(&mut dice)).collect();
            let wanted = expected(&firewall, &keys);
            assert_eq!(passed(graph, &mut run, &keys), wanted, "seed {seed} round {round}");
            compared += keys.len() - wanted.len();
        }
    }
    println!("{compared} packets dropped, {refused} rules refused");
    assert!(compared > 3_000, "the rules dropped only {compared}");
    assert!(refused > 5, "the tables were never full");
}

#[test]
fn after_every_single_signal_a_packet_meets_the_old_rules_or_the_new_ones() {
    let loaded = compiled(&small());
    let graph = &loaded.compiled.graph;
    let mut run = native(graph);
    let mut firewall = Firewall::of(graph).unwrap();
    let mut dice = Dice(77);
    let mut writes = Vec::new();
    let mut moves = 0;
    for _ in 0..60 {
        let before = firewall.clone();
        let rules = firewall.rules();
        if rules.len() > 30 && dice.below(2) == 0 {
            let at = usize::try_from(dice.below(rules.len() as u64)).unwrap();
            firewall.remove(rules[at].0, &mut writes).unwrap();
        } else {
            let rule = random_rule(&mut dice);
            let _ = firewall.add(rule, dice.below(2) == 0, &mut writes);
        }
        let total = writes.len();
        // Look after each of the first signals, then now and then.
        for (at, (node, signal)) in writes.drain(..).enumerate() {
            run.signal_now(node, signal).unwrap();
            if at > 6 && at % 197 != 0 && at + 4 < total {
                continue;
            }
            let keys: Vec<Key> = (0..12).map(|_| random_key(&mut dice)).collect();
            let found = passed(graph, &mut run, &keys);
            let (old, new) = (expected(&before, &keys), expected(&firewall, &keys));
            for number in 0..12 {
                let here = found.contains(&number);
                assert!(
                    here == old.contains(&number) || here == new.contains(&number),
                    "signal {at} of {total}: {:?}",
                    keys[number as usize]
                );
            }
            moves += 1;
        }
    }
    assert!(moves > 200, "{moves} looks");
}

#[test]
fn a_lost_signal_is_found_by_the_comparison() {
    let loaded = compiled(&small());
    let graph = &loaded.compiled.graph;
    let mut run = native(graph);
    let mut firewall = Firewall::of(graph).unwrap();
    let mut writes = Vec::new();
    let rule = "tcp 10.0.0.0/8 -> any :443 drop".parse().unwrap();
    firewall.add(rule, false, &mut writes).unwrap();
    writes.pop();
    apply(&mut run, &mut writes);
    let key = Key { source: 0x0a00_0001, destination: 1, ports: 443, protocol: 6 };
    assert_ne!(passed(graph, &mut run, &[key]), expected(&firewall, &[key]));
}

#[test]
fn ten_thousand_rules_fit_and_decide() {
    let loaded = compiled(templates::text("firewall").unwrap());
    let graph = &loaded.compiled.graph;
    let mut run = native(graph);
    let mut firewall = Firewall::of(graph).unwrap();
    let mut writes = Vec::new();
    for at in 0..10_000_u32 {
        let (a, b) = (at >> 8, at & 255);
        let rule = format!("tcp 10.{a}.{b}.0/24 -> any :443 drop").parse().unwrap();
        firewall.add(rule, false, &mut writes).unwrap();
        apply(&mut run, &mut writes);
    }
    let mut dice = Dice(5);
    let keys: Vec<Key> = (0..2_000)
        .map(|_| Key {
            source: 0x0a00_0000 | u32::try_from(dice.below(1 << 23)).unwrap(),
            destination: 9,
            ports: dice.of(&[443, 80]),
            protocol: 6,
        })
        .collect();
    let wanted = expected(&firewall, &keys);
    assert!(wanted.len() > 100 && wanted.len() < 1_900, "{}", wanted.len());
    assert_eq!(passed(graph, &mut run, &keys), wanted);
}

#[test]
fn commands_change_the_rules_and_show_what_they_did() {
    let loaded = compiled(&small());
    let graph = &loaded.compiled.graph;
    let mut run = native(graph);
    let mut manager = Manager::of(graph);
    let mut say = |run: &mut Run<'_, _>, text: &str| {
        let answer = manager.command(text, run).map_err(|error| error.to_string());
        while manager.apply(run, 10).unwrap() {}
        answer
    };
    let answer = say(&mut run, "rules add tcp 10.0.0.0/8 -> any :443 drop").unwrap();
    assert_eq!(answer, "rule 0: tcp 10.0.0.0/8 -> any :443 drop");
    let key = Key { source: 0x0a00_0001, destination: 1, ports: 443, protocol: 6 };
    assert!(passed(graph, &mut run, &[key, key]).is_empty());
    assert!(say(&mut run, "rules list").unwrap().contains("(2 packets)"));
    say(&mut run, "rules insert ip any -> any pass").unwrap();
    assert_eq!(passed(graph, &mut run, &[key]).len(), 1);
    say(&mut run, "rules remove 1").unwrap();
    assert!(passed(graph, &mut run, &[key]).is_empty());
    say(&mut run, "rules clear").unwrap();
    assert_eq!(passed(graph, &mut run, &[key]).len(), 1);
    say(&mut run, "rules default drop").unwrap();
    assert!(passed(graph, &mut run, &[key]).is_empty());
    assert!(say(&mut run, "rules counters").unwrap().starts_with("2 passed, 4 dropped, 3 of"));
    assert!(say(&mut run, "rules add tcp any :443").unwrap_err().contains("no ->"));
    assert!(say(&mut run, "rules remove 9").unwrap_err().contains("no rule 9"));
    assert!(say(&mut run, "rules juggle").unwrap_err().contains("rules add|insert RULE"));
    assert!(say(&mut run, "backends list").unwrap_err().contains("backends"));
}

#[test]
fn what_cannot_be_read_is_dropped_and_other_packets_are_unharmed() {
    let loaded = compiled(&small());
    let graph = &loaded.compiled.graph;
    let mut run = native(graph);
    let good = packet(Key { source: 1, destination: 2, ports: 80, protocol: 6 }, 0, 7);
    let mut options = good.clone();
    options[14] = 0x46;
    let mut arp = good.clone();
    arp[12..14].copy_from_slice(&[8, 6]);
    let short = good[..20].to_vec();
    let cut = good[..36].to_vec();
    let mut jumbo = good.clone();
    jumbo.resize(9_000, 0);
    let packets: Vec<(u64, Vec<u8>)> = [&good, &options, &arp, &short, &cut, &jumbo, &good]
        .into_iter()
        .map(|bytes| (0, bytes.clone()))
        .collect();
    let out = play(graph, &mut run, &packets).remove(0);
    assert_eq!(out, [good.clone(), arp, jumbo, good]);
}
