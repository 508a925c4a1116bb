//! `beeline cluster`: founding a cluster, and asking and telling a running one.
//!
//! Everything but `init` talks to the Redis door of some member. What only the leader can do is
//! carried to the leader.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_node::{Peer, PeerError};
use clap::{Args, Subcommand};
use serde::Serialize;

use crate::config::values::{ClusterWord, MemberWord, Members};
use crate::config::{Environment, FileLayer, Knob as _, ServeConfig, ServeFlags, SetMembers};
use crate::exit::{Exit, Failure};
use crate::output::{Output, table};

/// Longest wait for an answer. A member gives up a change of members after ten seconds.
const PATIENCE: Duration = Duration::from_secs(15);
/// A connection attempt.
const CONNECT: Duration = Duration::from_secs(2);
/// Times an order follows the leader.
const ATTEMPTS: u32 = 40;
/// Between two of them.
const PAUSE: Duration = Duration::from_millis(100);

/// `beeline cluster`.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Make a new cluster's identity and one configuration file per member.
    #[command(after_help = "Examples:\n  \
        beeline cluster init --peers 1=127.0.0.1:4791@127.0.0.1:6371,2=127.0.0.1:4792@127.0.0.1:6372,3=127.0.0.1:4793@127.0.0.1:6373\n  \
        beeline serve --config node-1.toml")]
    Init(InitArguments),
    /// Show the cluster as a member sees it.
    #[command(after_help = "Examples:\n  beeline cluster status\n  \
                            beeline cluster status --address 127.0.0.1:6371 --json")]
    Status(Door),
    /// Take a member in, which serves with --join on and empty data.
    #[command(after_help = "Examples:\n  \
        beeline cluster join --address 127.0.0.1:6371 4=127.0.0.1:4794@127.0.0.1:6374")]
    Join(JoinArguments),
    /// Let a member go. Its number is not used again.
    #[command(after_help = "Examples:\n  beeline cluster leave --address 127.0.0.1:6371 3")]
    Leave(OneMember),
    /// Give the leadership to a member.
    #[command(after_help = "Examples:\n  beeline cluster transfer --address 127.0.0.1:6371 2")]
    Transfer(OneMember),
    /// Take a snapshot at the member asked, so that its log can be overwritten.
    #[command(after_help = "Examples:\n  beeline cluster snapshot --address 127.0.0.1:6372")]
    Snapshot(Door),
}

/// `beeline cluster init`.
#[derive(Debug, Args)]
pub struct InitArguments {
    /// The members: NUMBER=FABRIC-ADDRESS@RESP-ADDRESS, apart by commas.
    #[arg(long, value_name = "MEMBERS", value_parser = Members::parse)]
    pub peers: Members,
    /// The members' documents are a replica set; each listens for MongoDB clients at its address of RESP, at
    /// port 27017 or, with others of its host before it, at the next.
    #[arg(long)]
    pub documents: bool,
    /// Where the files go, and where each member's data will lie.
    #[arg(long, value_name = "PATH", default_value = ".")]
    pub directory: PathBuf,
}

/// Whom to ask.
#[derive(Debug, Args)]
pub struct Door {
    /// Redis door of a member.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:6379")]
    pub address: SocketAddr,
    /// The members' password; better from BEELINE_REQUIRE_PASSWORD than from a flag.
    #[arg(long, value_name = "PASSWORD", env = "BEELINE_REQUIRE_PASSWORD", hide_env_values = true)]
    pub password: Option<String>,
}

/// `beeline cluster join`.
#[derive(Debug, Args)]
pub struct JoinArguments {
    #[command(flatten)]
    pub door: Door,
    /// The new member: NUMBER=FABRIC-ADDRESS@RESP-ADDRESS.
    #[arg(value_name = "MEMBER", value_parser = Members::parse)]
    pub member: Members,
}

/// `beeline cluster leave` and `transfer`.
#[derive(Debug, Args)]
pub struct OneMember {
    #[command(flatten)]
    pub door: Door,
    /// The member's number.
    #[arg(value_name = "NUMBER")]
    pub id: u16,
}

/// The command.
pub fn run(command: &ClusterCommand, output: Output) -> Result<Exit, Failure> {
    match command {
        ClusterCommand::Init(arguments) => init(arguments, output),
        ClusterCommand::Status(door) => status(door, output),
        ClusterCommand::Snapshot(door) => {
            let deadline = Instant::now() + PATIENCE;
            let mut peer = connect(door, &door.address.to_string())?;
            peer.ask(&[b"SNAPSHOT"], deadline, &mut || true).map_err(failure)?;
            told(output, "a snapshot was taken")
        }
        ClusterCommand::Join(JoinArguments { door, member }) => {
            let [member] = member.0.as_slice() else {
                let message = anyhow::anyhow!("join takes one member at a time");
                return Err(Failure::new(Exit::Usage, message));
            };
            let (id, log, resp) =
                (member.id.to_string(), member.log.to_string(), member.resp.to_string());
            order(door, &[b"JOIN", id.as_bytes(), log.as_bytes(), resp.as_bytes()])?;
            told(output, &format!("member {id} is one of the cluster"))
        }
        ClusterCommand::Leave(OneMember { door, id }) => {
            order(door, &[b"LEAVE", id.to_string().as_bytes()])?;
            told(output, &format!("member {id} left the cluster"))
        }
        ClusterCommand::Transfer(OneMember { door, id }) => {
            order(door, &[b"TRANSFER", id.to_string().as_bytes()])?;
            told(output, &format!("member {id} leads"))
        }
    }
}

fn told(output: Output, what: &str) -> Result<Exit, Failure> {
    if output.json {
        output.object(&serde_json::json!({ "done": what }))?;
    } else {
        output.line(what)?;
    }
    Ok(Exit::Done)
}

fn init(arguments: &InitArguments, output: Output) -> Result<Exit, Failure> {
    let InitArguments { peers, documents, directory } = arguments;
    if peers.0.is_empty() {
        return Err(Failure::new(Exit::Usage, anyhow::anyhow!("--peers names nobody")));
    }
    let cluster = ClusterWord(beeline_node::replicated::new_cluster_id()).show();
    std::fs::create_dir_all(directory)
        .with_context(|| format!("making {}", directory.display()))?;
    let (flags, file, environment) = <(ServeFlags, FileLayer, Environment)>::default();
    let (usual, _) =
        ServeConfig::load(&flags, &file, &environment).context("the defaults of `serve`")?;
    let set = match (documents, usual.documents.address.0) {
        (true, Some(door)) => documents_doors(door.port(), &peers.0),
        _ => SetMembers(BTreeMap::new()),
    };
    let documents = match set.0.is_empty() {
        true => String::new(),
        false => format!("[documents]\nmembers = {:?}\n", set.show()),
    };
    let usual = usual.http_address.0;
    let path = |member: &MemberWord| directory.join(format!("node-{}.toml", member.id));
    // All of them or none: members of two clusters would look like those of one.
    if let Some(there) = peers.0.iter().map(path).find(|file| file.exists()) {
        let there = there.display();
        return Err(Failure::from(anyhow::anyhow!(
            "{there} is there, and kept: choose another --directory"
        )));
    }
    let mut files = Vec::new();
    for member in &peers.0 {
        let data = directory.join(format!("node-{}", member.id));
        let file = path(member);
        let text = format!(
            "# Member {} of cluster {cluster}: beeline serve --config {}\n[serve]\ndata = {:?}\n\
             cluster = {cluster:?}\nnode-id = {}\npeers = {:?}\n{}{documents}",
            member.id,
            file.display(),
            data.display().to_string(),
            member.id,
            peers.show(),
            status_page(usual, &peers.0, member)
        );
        let mut made =
            std::fs::OpenOptions::new().write(true).create_new(true).open(&file).with_context(
                || format!("making {}; a file that is there is kept", file.display()),
            )?;
        std::io::Write::write_all(&mut made, text.as_bytes())?;
        files.push(file.display().to_string());
    }
    if output.json {
        output.object(
            &serde_json::json!({ "cluster": cluster, "files": files, "documents": set.show() }),
        )?;
    } else {
        output.line(format!("cluster {cluster}"))?;
        for file in &files {
            output.line(format!("  beeline serve --config {file}"))?;
        }
        if !set.0.is_empty() {
            let hosts: Vec<String> = set.0.values().map(ToString::to_string).collect();
            output.line(format!("documents mongodb://{}/?replicaSet=rs0", hosts.join(",")))?;
        }
    }
    Ok(Exit::Done)
}

/// Where the members listen for MongoDB clients: each its host, those of one host at one port after another.
fn documents_doors(first: u16, members: &[MemberWord]) -> SetMembers {
    let door = |member: &MemberWord| {
        let before = members.iter().take_while(|other| other.id != member.id);
        let taken = before.filter(|other| other.resp.ip() == member.resp.ip()).count();
        let port = first.saturating_add(u16::try_from(taken).unwrap_or(u16::MAX));
        (member.id, SocketAddr::new(member.resp.ip(), port))
    };
    SetMembers(members.iter().map(door).collect())
}

/// The line that gives a member a status page of its own, behind the `usual` one, where others of
/// its host come before it.
fn status_page(usual: Option<SocketAddr>, members: &[MemberWord], member: &MemberWord) -> String {
    let host = |of: &MemberWord| (!of.resp.ip().is_loopback()).then_some(of.resp.ip());
    let before = members.iter().take_while(|other| other.id != member.id);
    let taken = before.filter(|other| host(other) == host(member)).count();
    let (Some(mut page), Ok(taken @ 1..)) = (usual, u16::try_from(taken)) else {
        return String::new();
    };
    page.set_port(page.port().saturating_add(taken));
    format!("http-address = \"{page}\"\n")
}

fn failure(error: PeerError) -> Failure {
    let exit = match &error {
        PeerError::Unreachable { .. } | PeerError::TimedOut { .. } => Exit::Unreachable,
        _ => Exit::Failed,
    };
    Failure::new(exit, error)
}

fn connect(door: &Door, address: &str) -> Result<Peer, Failure> {
    Peer::discover(address, door.password.as_deref(), CONNECT).map_err(|error| match error {
        PeerError::Unreachable { address, source } => Failure::new(
            Exit::Unreachable,
            anyhow::anyhow!(
                "no member answers at {address}: {source}; is `beeline serve` running there, and \
                 is this its --resp-address? Another member can be asked with --address"
            ),
        ),
        PeerError::Protocol { address } => Failure::new(
            Exit::Failed,
            anyhow::anyhow!(
                "{address} answers, but not as a member of a cluster does; --address takes the \
                 --resp-address of a node that was started with --peers"
            ),
        ),
        error => failure(error),
    })
}

/// The lines of a member's status, as pairs.
fn lines(peer: &mut Peer) -> Result<Vec<(String, String)>, Failure> {
    let deadline = Instant::now() + PATIENCE;
    let text = peer.ask(&[b"STATUS"], deadline, &mut || true).map_err(failure)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let pair = |line: &str| line.split_once(':').map(|(name, value)| (name.into(), value.into()));
    Ok(text.lines().filter_map(pair).collect())
}

#[derive(Debug, Serialize)]
struct MemberRow {
    id: String,
    fabric: String,
    resp: String,
    role: &'static str,
    connected: String,
    lag: String,
}

fn member_rows(lines: &[(String, String)], leader: &str) -> Vec<MemberRow> {
    let members = lines.iter().filter(|(name, _)| {
        name.strip_prefix("member").is_some_and(|rest| rest.parse::<u32>().is_ok())
    });
    members
        .map(|(_, value)| {
            let field = |wanted: &str| {
                let found = value.split(',').find_map(|part| {
                    part.split_once('=').filter(|(name, _)| *name == wanted).map(|(_, value)| value)
                });
                found.unwrap_or_default().to_owned()
            };
            let id = field("id");
            let role = if id == leader { "leader" } else { "follower" };
            let (fabric, resp) = (field("log"), field("resp"));
            MemberRow { role, id, fabric, resp, connected: field("connected"), lag: field("lag") }
        })
        .collect()
}

fn value<'l>(lines: &'l [(String, String)], name: &str) -> &'l str {
    lines.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value.as_str())
}

fn status(door: &Door, output: Output) -> Result<Exit, Failure> {
    let mut peer = connect(door, &door.address.to_string())?;
    let mut lines = lines(&mut peer)?;
    let leader = value(&lines, "log_leader").to_owned();
    let mut rows = member_rows(&lines, &leader);
    // The leader knows what the others have.
    let at_leader = rows.iter().find(|row| row.id == leader).map(|row| row.resp.clone());
    if leader != value(&lines, "node_id")
        && let Some(address) = at_leader
        && let Ok(mut peer) = connect(door, &address)
        && let Ok(told) = self::lines(&mut peer)
    {
        rows = member_rows(&told, &leader);
        for name in ["log_committed", "log_term"] {
            let fresh = value(&told, name).to_owned();
            if let Some((_, known)) = lines.iter_mut().find(|(known, _)| known == name) {
                *known = fresh;
            }
        }
    }
    if output.json {
        let facts: serde_json::Map<_, _> = lines
            .iter()
            .filter(|(name, _)| name.starts_with("log_") || name.ends_with("_id"))
            .map(|(name, value)| (name.clone(), serde_json::json!(value)))
            .collect();
        output.object(&serde_json::json!({ "asked": facts, "members": rows }))?;
        return Ok(Exit::Done);
    }
    output.line(format!(
        "cluster {}  term {}  committed {}  leader {leader}",
        value(&lines, "cluster_id"),
        value(&lines, "log_term"),
        value(&lines, "log_committed"),
    ))?;
    let cells: Vec<Vec<String>> = rows
        .into_iter()
        .map(|row| vec![row.id, row.role.to_owned(), row.fabric, row.resp, row.connected, row.lag])
        .collect();
    let heads = ["MEMBER", "ROLE", "FABRIC", "RESP", "CONNECTED", "LAG"];
    output.bytes(table(&heads, &cells).as_bytes())?;
    Ok(Exit::Done)
}

/// Has the leader carry out an order, whoever that is by then.
fn order(door: &Door, words: &[&[u8]]) -> Result<(), Failure> {
    let mut address = door.address.to_string();
    let mut last = None;
    for _ in 0..ATTEMPTS {
        let asked = connect(door, &address).and_then(|mut peer| {
            let deadline = Instant::now() + PATIENCE;
            match peer.ask(words, deadline, &mut || true) {
                Ok(_) => Ok(None),
                Err(PeerError::Error { line }) if line.starts_with("NOT") => {
                    let lines = lines(&mut peer)?;
                    let leader = value(&lines, "log_leader").to_owned();
                    let rows = member_rows(&lines, &leader);
                    let found = rows.into_iter().find(|row| row.id == leader).map(|row| row.resp);
                    Ok(Some((found, line)))
                }
                Err(error) => Err(failure(error)),
            }
        });
        match asked {
            Ok(None) => return Ok(()),
            Ok(Some((leader, line))) => {
                address = leader.unwrap_or(address);
                last = Some(Failure::new(Exit::Failed, anyhow::anyhow!("{line}")));
            }
            // The leader it named is gone: somebody else knows the next one.
            Err(gone) if gone.exit == Exit::Unreachable && address != door.address.to_string() => {
                address = door.address.to_string();
                last = Some(gone);
            }
            Err(error) => return Err(error),
        }
        std::thread::sleep(PAUSE);
    }
    Err(last.unwrap_or_else(|| Failure::new(Exit::Unreachable, anyhow::anyhow!("no leader"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_one_host_get_status_pages_of_their_own() {
        let word = "1=10.0.0.1:4790@10.0.0.1:6379,2=10.0.0.2:4790@10.0.0.2:6379,\
                    3=10.0.0.1:4791@10.0.0.1:6380,4=127.0.0.1:4790@127.0.0.1:6379,\
                    5=127.0.0.2:4790@127.0.0.2:6379";
        let Ok(Members(members)) = Members::parse(word) else { panic!("five members") };
        let usual = "127.0.0.1:9464".parse().ok();
        let lines: Vec<_> =
            members.iter().map(|member| status_page(usual, &members, member)).collect();
        let own = "http-address = \"127.0.0.1:9465\"\n";
        assert_eq!(lines, ["", "", own, "", own]);
    }

    #[test]
    fn members_of_one_host_listen_for_documents_one_port_after_another() {
        let word = "1=10.0.0.1:4790@10.0.0.1:6379,2=10.0.0.2:4790@10.0.0.2:6379,\
                    3=10.0.0.1:4791@10.0.0.1:6380";
        let Ok(Members(members)) = Members::parse(word) else { panic!("three members") };
        let set = documents_doors(27017, &members);
        assert_eq!(set.show(), "1=10.0.0.1:27017,2=10.0.0.2:27017,3=10.0.0.1:27018");
        assert_eq!(SetMembers::parse(&set.show()), Ok(set));
        for wrong in [
            "1",
            "0=10.0.0.1:1",
            "1=10.0.0.1:0",
            "1=a:1",
            "1=10.0.0.1:1,1=10.0.0.1:2",
            "1=10.0.0.1:1,2=10.0.0.1:1",
        ] {
            assert!(SetMembers::parse(wrong).is_err(), "{wrong}");
        }
    }
}
