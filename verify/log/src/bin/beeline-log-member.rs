//! A member of a replicated log as a process, for tests that kill, stop and cut off processes.
//!
//! `beeline-log-member FOLDER ID CLUSTER PROVIDER LOG-ADDRESS CLIENT-ADDRESS SLOTS SLOT-BYTES MEMBERS`
//! makes the member in FOLDER unless there is one; MEMBERS is `ID=LOG-ADDRESS,...`, or `-` for a
//! server that will join. Clients speak lines over TCP; each is answered by `ok ...`, `retry ...`
//! (here or elsewhere, later) or `fail ...`:
//!
//! ```text
//! open                                append SESSION NUMBER KEY ITEM PADDING
//! read KEY       stale KEY            status          snapshot
//! join ID LOG-ADDRESS                 leave ID        transfer ID
//! trap ID        the next copy into member ID's log stops this process in its middle
//! ```

use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric_open::{Bootstrap, BootstrapConfig, open};
use beeline_replicated_log::{
    ClusterId, Config, Consistency, Contact, Durability, Founding, Handle, Home, Layout, NodeId,
    Refusal, Server,
};
use beeline_verify_log::bootstrap::{ToMembers, service};
use beeline_verify_log::lists::{Lists, items, padded_append};
use beeline_verify_log::trap;

const LIMIT: Duration = Duration::from_secs(2);

type Failure = Box<dyn std::error::Error>;

fn contact(address: &str) -> Contact {
    Contact { address: address.to_owned(), details: Vec::new() }
}

fn members(list: &str) -> Result<Vec<(NodeId, Contact)>, Failure> {
    let entry = |entry: &str| {
        let (id, address) = entry.split_once('=').ok_or("a member is ID=ADDRESS")?;
        Ok((NodeId(id.parse()?), contact(address)))
    };
    list.split(',').filter(|part| *part != "-").map(entry).collect()
}

fn answer<T>(outcome: Result<T, Refusal>, show: impl Fn(T) -> String) -> String {
    match outcome {
        Ok(value) => format!("ok {}", show(value)),
        Err(refusal) if refusal.is_retryable() => format!("retry {refusal}"),
        Err(refusal) => format!("fail {refusal}"),
    }
}

fn show_items(answer: Vec<u8>) -> String {
    items(&answer).iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

fn status(handle: &Handle) -> String {
    let status = handle.status();
    let members: Vec<_> = status.members.iter().map(|member| member.id.0.to_string()).collect();
    let problems: Vec<_> =
        status.members.iter().filter_map(|member| member.problem.as_deref()).collect();
    format!(
        "ok role={:?} term={} leader={} committed={} applied={} snapshot={} installed={} \
         failed={} fences={} reached={} members={} problems={}",
        status.role,
        status.term,
        status.leader.map_or("-".to_owned(), |id| id.0.to_string()),
        status.committed,
        status.applied,
        status.snapshot,
        status.counters.snapshots_installed,
        status.counters.snapshots_failed,
        status.counters.fence_failures,
        status.members.iter().filter(|member| member.confirmed.is_some()).count(),
        members.join(","),
        problems.join("; ").replace(' ', "_"),
    )
}

fn respond(handle: &Handle, folder: &Path, line: &str) -> Result<String, Failure> {
    let words: Vec<_> = line.split_whitespace().collect();
    let nothing = |()| String::new();
    Ok(match words.as_slice() {
        ["open"] => answer(handle.session(LIMIT), |name| name.to_string()),
        ["append", session, number, key, item, padding] => {
            let bytes = padded_append(key.parse()?, item.parse()?, padding.parse()?);
            let reply = handle.call(session.parse()?, number.parse()?, bytes, LIMIT);
            answer(reply, |reply| {
                let length = reply.bytes.first_chunk::<8>().copied().unwrap_or_default();
                u64::from_le_bytes(length).to_string()
            })
        }
        ["read", key] => {
            answer(handle.read(vec![key.parse()?], Consistency::Linearizable, LIMIT), show_items)
        }
        ["stale", key] => {
            answer(handle.read(vec![key.parse()?], Consistency::Stale, LIMIT), show_items)
        }
        ["status"] => status(handle),
        ["snapshot"] => answer(handle.snapshot_wait(LIMIT), |position| position.to_string()),
        ["join", id, address] => {
            let joined = handle.join_wait(NodeId(id.parse()?), contact(address), 5 * LIMIT);
            answer(joined, |position| position.to_string())
        }
        ["leave", id] => {
            let left = handle.leave_wait(NodeId(id.parse()?), 5 * LIMIT);
            answer(left, |position| position.to_string())
        }
        ["transfer", id] => answer(handle.transfer_wait(NodeId(id.parse()?), 5 * LIMIT), nothing),
        ["trap", id] => {
            let peer = folder.parent().unwrap_or(folder).join(id).join("log");
            format!("ok {}", trap::set(&peer)?)
        }
        ["trapped"] => format!("ok {}", trap::sprung()),
        _ => "fail unknown".to_owned(),
    })
}

fn serve(handle: &Handle, folder: &Path, stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut out = stream.try_clone()?;
    for line in BufReader::new(stream).lines() {
        let answer = respond(handle, folder, &line?);
        let answer = answer.unwrap_or_else(|error| format!("fail {error}"));
        out.write_all(format!("{answer}\n").as_bytes())?;
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, id, cluster, provider, log, clients, slots, slot_bytes, list] =
        arguments.as_slice()
    else {
        return Err("see the source for the arguments".into());
    };
    // A test that is ended leaves nobody behind.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let folder = Path::new(folder).to_owned();
    let durability = match std::env::var("BEELINE_LOG_DURABILITY").as_deref() {
        Ok("power") => Durability::Power,
        _ => Durability::Process,
    };
    if !Home::exists(&folder) {
        let founding = Founding {
            cluster: ClusterId(cluster.parse()?),
            id: NodeId(id.parse()?),
            layout: Layout::new(slots.parse()?, slot_bytes.parse()?)?,
            sessions: 1024,
            members: members(list)?,
        };
        Home::create(&folder, &founding, durability)?;
    }
    let home = Home::open(&folder, durability)?;
    let address: std::net::SocketAddr = log.parse()?;
    let device = match provider.as_str() {
        // Data queue pairs listen where the log does, so that other namespaces reach them.
        "tcp" => open(&format!("tcp://{}", address.ip()))?,
        provider => open(&format!("{provider}://"))?,
    };
    let transport = Arc::new(ToMembers::new(provider));
    let config = Config::new(Arc::clone(&device), transport, contact(log));
    let (server, handle) = Server::start(home, config, Lists::default())?;
    let bootstrap = BootstrapConfig { tcp: Some(address), ..BootstrapConfig::default() };
    let _bootstrap = Bootstrap::listen(bootstrap, vec![device], vec![service(handle.clone())])?;
    let listener = TcpListener::bind(clients.as_str())?;
    writeln!(io::stdout(), "ready")?;
    for stream in listener.incoming() {
        let (handle, folder, stream) = (handle.clone(), folder.clone(), stream?);
        std::thread::spawn(move || serve(&handle, &folder, stream));
        if !server.is_running() {
            break;
        }
    }
    Ok(server.stop()?)
}
