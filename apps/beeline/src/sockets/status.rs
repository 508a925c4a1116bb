//! `beeline sockets status`, `metrics` and `connections`.

use std::collections::{BTreeMap, HashSet};

use anyhow::Context as _;
use beeline_sockets::control::{Answer, Introduced, Question, Status};
use beeline_sockets::introduce;
use beeline_sockets::relayed::{Adopted, RelayStatus, Reply, Request};
use serde::Serialize;

use super::proxy;
use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::{Output, table};

pub fn ask(question: Question) -> Result<std::os::fd::OwnedFd, Failure> {
    let socket = introduce::dial()
        .context("no monitor of this user answers; `beeline run` starts one")
        .or_exit(Exit::Unreachable)?;
    introduce::ask(&socket, question, None).or_exit(Exit::Unreachable)?;
    Ok(socket)
}

#[derive(Serialize)]
struct StatusLine {
    process: u32,
    up_seconds: u64,
    asked: u64,
    paired: u64,
    waiting: u64,
    refused: u64,
    denied: u64,
    kept: u64,
    relayed: u64,
    no_hosts: u64,
    strangers: u64,
    over_tcp: u64,
    held: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    relay: Option<RelayLine>,
    #[serde(skip_serializing_if = "Option::is_none")]
    proxy: Option<BTreeMap<String, String>>,
}

/// Counters of the relay, where there is one.
#[derive(Serialize)]
struct RelayLine {
    process: u32,
    up_seconds: u64,
    connections: u64,
    waiting: u64,
    links: u64,
    paired: u64,
    broken: u64,
    sent_bytes: u64,
    received_bytes: u64,
    messages: u64,
    writes: u64,
    bells: u64,
    doorbells: u64,
    recalled: u64,
    sleepy: u64,
    over_tcp: u64,
}

impl From<RelayStatus> for RelayLine {
    fn from(status: RelayStatus) -> Self {
        let RelayStatus { process, up_seconds, connections, waiting, links, paired, .. } = status;
        let RelayStatus { broken, sent_bytes, received_bytes, messages, writes, .. } = status;
        let RelayStatus { bells, doorbells, recalled, sleepy, over_tcp, .. } = status;
        Self {
            process,
            up_seconds,
            connections,
            waiting,
            links,
            paired,
            broken,
            sent_bytes,
            received_bytes,
            messages,
            writes,
            bells,
            doorbells,
            recalled,
            sleepy,
            over_tcp,
        }
    }
}

impl RelayLine {
    fn rows(&self) -> [(&'static str, u64); 16] {
        [
            ("relay's process", u64::from(self.process)),
            ("up, seconds", self.up_seconds),
            ("connections to other hosts", self.connections),
            ("ends that wait for the other relay", self.waiting),
            ("linked hosts", self.links),
            ("connections that both relays had", self.paired),
            ("of these, broken", self.broken),
            ("bytes sent", self.sent_bytes),
            ("bytes received", self.received_bytes),
            ("messages sent", self.messages),
            ("one-sided writes", self.writes),
            ("bells heard", self.bells),
            ("doorbells sent", self.doorbells),
            ("brought back to the kernel", self.recalled),
            ("of these, for programs here that slept", self.sleepy),
            ("left to the kernel: the link would be TCP", self.over_tcp),
        ]
    }
}

/// The relay's counters, if there is one.
fn relay() -> Option<RelayStatus> {
    match introduce::ask_relay(Request::Status).ok()?.pop()? {
        Reply::Status(status) => Some(status),
        _ => None,
    }
}

fn fetch() -> Result<Status, Failure> {
    let socket = ask(Question::Status)?;
    let (answer, _) = introduce::answer(&socket).or_exit(Exit::Unreachable)?;
    if let Answer::Status(status) = answer { Ok(status) } else { Err(strange()) }
}

/// As a collector of text files takes them.
pub fn metrics(output: Output) -> Result<Exit, Failure> {
    output.bytes(exposition(&fetch()?, relay().as_ref()).as_bytes())?;
    Ok(Exit::Done)
}

fn exposition(status: &Status, relay: Option<&RelayStatus>) -> String {
    let mut metrics = vec![
        ("up_seconds", "gauge", "Seconds since the monitor began.", status.up_seconds),
        ("asked_total", "counter", "Ends of connections that asked.", status.asked),
        ("introduced_total", "counter", "Connections of which both ends asked.", status.paired),
        ("waiting", "gauge", "Ends that wait for their other end.", status.waiting),
        ("refused_total", "counter", "Ends left to the kernel.", status.refused),
        ("denied_total", "counter", "Ends left to the kernel by the policy.", status.denied),
        ("no_hosts_total", "counter", "Of those refused: no hosts.", status.no_hosts),
        ("strangers_total", "counter", "Of those refused: another host.", status.strangers),
        ("over_tcp_total", "counter", "Of those refused: a link by TCP.", status.over_tcp),
        ("held_total", "counter", "Of those refused: called back.", status.held),
        ("kept", "gauge", "Segments kept for ends that change programs.", status.kept),
        ("relayed_total", "counter", "Ends handed to the relay.", status.relayed),
    ];
    if let Some(relay) = relay {
        metrics.extend([
            ("relay_up_seconds", "gauge", "Seconds since the relay began.", relay.up_seconds),
            ("relay_connections", "gauge", "Connections to other hosts.", relay.connections),
            ("relay_waiting", "gauge", "Ends that wait for the other relay.", relay.waiting),
            ("relay_links", "gauge", "Linked relays of other hosts.", relay.links),
            ("relay_paired_total", "counter", "Connections that both relays had.", relay.paired),
            ("relay_broken_total", "counter", "Connections a broken link ended.", relay.broken),
            ("relay_sent_bytes_total", "counter", "Bytes to other hosts.", relay.sent_bytes),
            (
                "relay_received_bytes_total",
                "counter",
                "Bytes from other hosts.",
                relay.received_bytes,
            ),
            ("relay_messages_total", "counter", "Messages to other relays.", relay.messages),
            ("relay_writes_total", "counter", "One-sided writes to other hosts.", relay.writes),
            ("relay_bells_total", "counter", "Bells heard from programs.", relay.bells),
            ("relay_doorbells_total", "counter", "Doorbells sent.", relay.doorbells),
            ("relay_over_tcp_total", "counter", "Ends left: a link by TCP.", relay.over_tcp),
        ]);
    }
    let mut text = String::new();
    for (name, kind, help, value) in metrics {
        let family = format!("beeline_sockets_{}", name.trim_end_matches("_total"));
        text += &format!("# HELP {family} {help}\n# TYPE {family} {kind}\n");
        text += &format!("beeline_sockets_{name} {value}\n");
    }
    text + "# EOF\n"
}

/// Counters.
pub fn status(output: Output) -> Result<Exit, Failure> {
    let proxy = proxy::status();
    let status = match (fetch(), &proxy) {
        (Ok(status), _) => status,
        // A proxy alone has much to say.
        (Err(_), Some(lines)) => return proxy_alone(lines, output),
        (Err(failure), None) => return Err(failure),
    };
    let Status { process, up_seconds, asked, paired, waiting, .. } = status;
    let Status { refused, denied, kept, relayed, no_hosts, strangers, over_tcp, held, .. } = status;
    let relay = relay().map(RelayLine::from);
    let line = StatusLine {
        process,
        up_seconds,
        asked,
        paired,
        waiting,
        refused,
        denied,
        kept,
        relayed,
        no_hosts,
        strangers,
        over_tcp,
        held,
        relay,
        proxy: proxy.as_ref().map(|lines| lines.iter().cloned().collect()),
    };
    if output.json {
        output.object(&line)?;
        return Ok(Exit::Done);
    }
    let rows = [
        ("monitor's process", u64::from(process)),
        ("up, seconds", up_seconds),
        ("ends that asked", asked),
        ("connections introduced", paired),
        ("ends that wait for their other end", waiting),
        ("ends left to the kernel", refused),
        ("of these, by the policy", denied),
        ("to another host, with none configured", no_hosts),
        ("to another host than those configured", strangers),
        ("to another host, by way of TCP", over_tcp),
        ("of a program that is called back", held),
        ("segments kept for a change of programs", kept),
        ("ends handed to the relay", relayed),
    ];
    let relay = line.relay.iter().flat_map(RelayLine::rows);
    let cells: Vec<Vec<String>> = rows
        .into_iter()
        .chain(relay)
        .map(|(name, value)| vec![name.to_owned(), value.to_string()])
        .chain(proxy.iter().flatten().map(|(name, value)| vec![name.clone(), value.clone()]))
        .collect();
    output.bytes(table(&["SOCKETS", "NOW"], &cells).as_bytes())?;
    Ok(Exit::Done)
}

/// The proxy's counters, where no monitor of rings runs.
fn proxy_alone(lines: &[(String, String)], output: Output) -> Result<Exit, Failure> {
    if output.json {
        let all: BTreeMap<_, _> = lines.iter().map(|(name, value)| (name, value)).collect();
        output.object(&BTreeMap::from([("proxy", all)]))?;
        return Ok(Exit::Done);
    }
    let cells: Vec<_> =
        lines.iter().map(|(name, value)| vec![name.clone(), value.clone()]).collect();
    output.bytes(table(&["SOCKETS", "NOW"], &cells).as_bytes())?;
    Ok(Exit::Done)
}

#[derive(Serialize)]
struct ConnectionLine {
    first: String,
    first_process: u32,
    second: String,
    second_process: u32,
}

/// Connections to other hosts as the relay has them, and what they moved out and in; none without one.
/// It outlives the monitor, which may have forgotten them.
pub fn carried() -> Vec<(Introduced, [u64; 2])> {
    let replies = introduce::ask_relay(Request::Connections).unwrap_or_default();
    let carried = replies.into_iter().filter_map(|reply| match reply {
        Reply::Connection { connection, paired: true, moved } => {
            let Adopted { own: first, peer: second, process: first_process, .. } = connection;
            Some((Introduced { first, first_process, second, second_process: 0 }, moved))
        }
        _ => None,
    });
    carried.collect()
}

/// The latest introductions.
pub fn connections(output: Output) -> Result<Exit, Failure> {
    let socket = ask(Question::Connections)?;
    let mut all = Vec::new();
    loop {
        match introduce::answer(&socket).or_exit(Exit::Unreachable)?.0 {
            Answer::Connection(introduced) => all.push(introduced),
            Answer::End => break,
            _ => return Err(strange()),
        }
    }
    let ends = |one: &Introduced| (one.first, one.second);
    let known: HashSet<_> = all.iter().map(ends).collect();
    let carried = carried().into_iter().map(|(connection, _)| connection);
    all.extend(carried.filter(|one| !known.contains(&ends(one))));
    let mut cells = Vec::new();
    for Introduced { first, first_process, second, second_process } in all {
        let (first, second) = (first.to_string(), second.to_string());
        if output.json {
            output.object(&ConnectionLine { first, first_process, second, second_process })?;
        } else {
            let (one, two) = (process(first_process), process(second_process));
            cells.push(vec![first, one, second, two]);
        }
    }
    if !output.json {
        let header = ["ONE END", "PROCESS", "OTHER END", "PROCESS"];
        output.bytes(table(&header, &cells).as_bytes())?;
    }
    Ok(Exit::Done)
}

/// A process, or that there is none of this host.
pub fn process(number: u32) -> String {
    if number == 0 { "other host".to_owned() } else { number.to_string() }
}

pub fn strange() -> Failure {
    Failure::new(Exit::Unreachable, anyhow::anyhow!("the monitor answered something else"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_name_each_family_and_its_kind() {
        let text = exposition(&Status { asked: 7, kept: 3, ..Status::default() }, None);
        assert!(
            text.contains("# TYPE beeline_sockets_asked counter\nbeeline_sockets_asked_total 7")
        );
        assert!(text.contains("beeline_sockets_kept 3\n") && text.ends_with("# EOF\n"), "{text}");
        assert!(!text.contains("relay_"), "{text}");
        let relay = RelayStatus { links: 2, ..RelayStatus::default() };
        let text = exposition(&Status::default(), Some(&relay));
        assert!(text.contains("beeline_sockets_relay_links 2\n"), "{text}");
    }
}
