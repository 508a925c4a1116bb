//! A host of many members as a process, for tests that kill and stop hosts.
//!
//! `beeline-log-host FOLDER ID PROVIDER LOG-ADDRESS CLUSTERS HOSTS` makes the members of clusters
//! 0 to CLUSTERS - 1 in FOLDER unless they are there; HOSTS is `ID=LOG-ADDRESS,...`. It is asked by lines on
//! its standard input, and answers each by one of `ok ...`, `retry ...`, `fail ...`:
//!
//! ```text
//! append CLUSTER ITEM       list CLUSTER
//! lead ITEM                 appends it in each cluster that it is the leader of; in how many
//! hold ITEM                 how many clusters have it here
//! leads                     of how many clusters it is the leader
//! roles                     of each cluster: its role, term, leader, and which members it is connected to
//! threads                   members, members at rest, wake-ups, turns, silences; what its threads ran,
//!                           nanoseconds, and how often they gave up the processor by themselves; control
//!                           connections
//! ```

use std::io::{self, BufRead, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric_open::{Bootstrap, BootstrapConfig, open};
use beeline_replicated_log::{
    ClusterId, Consistency, Contact, Durability, Founding, Handle, Home, Host, HostConfig, Layout,
    NO_SESSION, NodeId, RoleName,
};
use beeline_verify_log::bootstrap::{ToMembers, host_service};
use beeline_verify_log::lists::{Lists, items};
use beeline_verify_log::machine::append;

const LIMIT: Duration = Duration::from_secs(2);

type Failure = Box<dyn std::error::Error>;

fn contact(address: &str) -> Contact {
    Contact { address: address.to_owned(), details: Vec::new() }
}

fn hosts(list: &str) -> Result<Vec<(NodeId, Contact)>, Failure> {
    let entry = |entry: &str| {
        let (id, address) = entry.split_once('=').ok_or("a host is ID=ADDRESS")?;
        Ok((NodeId(id.parse()?), contact(address)))
    };
    list.split(',').map(entry).collect()
}

/// Of the threads that run members: nanoseconds on a processor, and waits.
fn ran() -> io::Result<(u64, u64)> {
    let (mut ran_ns, mut waits) = (0, 0);
    for task in std::fs::read_dir("/proc/self/task")? {
        let path = task?.path();
        // A thread that dials may have ended by now.
        let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        if !name.starts_with("log-host-") {
            continue;
        }
        let told = std::fs::read_to_string(path.join("schedstat"))?;
        let first = told.split_whitespace().next().and_then(|word| word.parse::<u64>().ok());
        ran_ns += first.unwrap_or_default();
        let status = std::fs::read_to_string(path.join("status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        waits += line.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or_default();
    }
    Ok((ran_ns, waits))
}

fn respond(host: &Host, members: &[Handle], line: &str) -> Result<String, Failure> {
    let words: Vec<_> = line.split_whitespace().collect();
    let member = |cluster: &str| -> Result<&Handle, Failure> {
        Ok(members.get(cluster.parse::<usize>()?).ok_or("no such cluster")?)
    };
    Ok(match words.as_slice() {
        ["append", cluster, item] => {
            let command = append(1, item.parse()?);
            match member(cluster)?.call(NO_SESSION, 0, command, LIMIT) {
                Ok(_) => "ok".to_owned(),
                Err(refusal) if refusal.is_retryable() => format!("retry {refusal}"),
                Err(refusal) => format!("fail {refusal}"),
            }
        }
        ["list", cluster] => {
            let answer = member(cluster)?.read(vec![1], Consistency::Stale, LIMIT)?;
            let list: Vec<_> = items(&answer).iter().map(u32::to_string).collect();
            format!("ok {}", list.join(","))
        }
        ["lead", item] => {
            let command = append(1, item.parse()?);
            let led = members.iter().filter(|member| member.status().role == RoleName::Leader);
            let (sender, answers) = std::sync::mpsc::channel();
            for member in led {
                let sender = sender.clone();
                // Its receiver waits for as many.
                let tell = move |outcome: Result<_, _>| {
                    let _ = sender.send(outcome.is_ok());
                };
                member.propose(NO_SESSION, 0, command.clone(), tell);
            }
            drop(sender);
            format!("ok {}", answers.iter().filter(|done| *done).count())
        }
        ["hold", item] => {
            let item: u32 = item.parse()?;
            let mut count = 0;
            for member in members {
                let answer = member.read(vec![1], Consistency::Stale, LIMIT)?;
                count += usize::from(items(&answer).contains(&item));
            }
            format!("ok {count}")
        }
        ["leads"] => {
            let leads = |member: &&Handle| member.status().role == RoleName::Leader;
            format!("ok {}", members.iter().filter(leads).count())
        }
        ["roles"] => {
            let role = |member: &Handle| {
                let status = member.status();
                let (term, connected) = (
                    status.term,
                    status.members.iter().map(|member| {
                        format!("{}{}", member.id.0, if member.connected { "+" } else { "-" })
                    }),
                );
                let connected: String = connected.collect();
                let leader = status.leader.map_or(0, |leader| leader.0);
                format!("{:?}/{term}/{leader}/{connected}", status.role)
            };
            format!("ok {}", members.iter().map(role).collect::<Vec<_>>().join(" "))
        }
        ["threads"] => {
            let threads = host.threads();
            let sum = |of: fn(&beeline_replicated_log::ThreadStatus) -> u64| -> u64 {
                threads.iter().map(of).sum()
            };
            let (ran_ns, waits) = ran()?;
            format!(
                "ok {} {} {} {} {} {ran_ns} {waits} {}",
                sum(|status| status.members),
                sum(|status| status.resting),
                sum(|status| status.wakeups),
                sum(|status| status.turns),
                sum(|status| status.silences),
                sum(|status| status.lines),
            )
        }
        _ => "fail unknown".to_owned(),
    })
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, id, provider, log, clusters, list] = arguments.as_slice() else {
        return Err("see the source for the arguments".into());
    };
    // A test that is ended leaves no process behind.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let (folder, durability) = (Path::new(folder), Durability::Process);
    let device = open(&format!("{provider}://"))?;
    let transport = Arc::new(ToMembers::new(provider));
    let rest = Duration::from_millis(500);
    let config = HostConfig { rest, ..HostConfig::new(Arc::clone(&device), transport) };
    let host = Host::start(config)?;
    let bootstrap = BootstrapConfig { tcp: Some(log.parse()?), ..BootstrapConfig::default() };
    let service = host_service(host.entrance());
    let _bootstrap = Bootstrap::listen(bootstrap, vec![device], vec![service])?;
    let mut members = Vec::new();
    for cluster in 0..clusters.parse()? {
        let place = folder.join(cluster.to_string());
        if !Home::exists(&place) {
            let founding = Founding {
                cluster: ClusterId(cluster + 1),
                id: NodeId(id.parse()?),
                layout: Layout::new(64, 256)?,
                sessions: 16,
                members: hosts(list)?,
            };
            Home::create(&place, &founding, durability)?;
        }
        let home = Home::open(&place, durability)?;
        members.push(host.open(home, contact(log), Lists::default())?);
    }
    let mut out = io::stdout();
    writeln!(out, "ready")?;
    for line in io::stdin().lock().lines() {
        let answer = respond(&host, &members, &line?);
        let answer = answer.unwrap_or_else(|error| format!("fail {error}"));
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}
