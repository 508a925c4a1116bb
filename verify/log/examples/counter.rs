//! A replicated counter: three members in one process. With `ToMembers` of
//! `beeline_verify_log::bootstrap` for [`InProcess`] they are processes, also on other machines.
#![allow(clippy::print_stdout, missing_docs)]
use std::io::{self, Read, Write};
use std::{sync::Arc, time::Duration};

use beeline_fabric_open::open;
use beeline_replicated_log::{
    ClusterId, Config, Contact, Durability, Founding, Home, InProcess, Layout, NodeId, Position,
    RoleName, Server, SnapshotWriter, StateMachine,
};

struct Counter(u64);

impl StateMachine for Counter {
    fn apply(&mut self, _position: Position, command: &[u8], reply: &mut Vec<u8>) {
        self.0 += command.len() as u64;
        reply.extend_from_slice(&self.0.to_le_bytes());
    }

    fn snapshot(&mut self) -> io::Result<SnapshotWriter> {
        let now = self.0;
        Ok(Box::new(move |out: &mut dyn Write| out.write_all(&now.to_le_bytes())))
    }

    fn restore(&mut self, _position: Position, reader: &mut dyn Read) -> io::Result<()> {
        let mut bytes = [0; 8];
        reader.read_exact(&mut bytes)?;
        self.0 = u64::from_le_bytes(bytes);
        Ok(())
    }
}

pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let place = tempfile::tempdir()?;
    let contact = |id| Contact { address: format!("member {id}"), ..Contact::default() };
    let members: Vec<_> = (1..=3).map(|id| (NodeId(id), contact(id))).collect();
    let (cluster, layout) = (ClusterId(2024), Layout::new(1024, 2048)?);
    let transport = Arc::<InProcess>::default();
    let mut running = Vec::new();
    for (id, own) in members.clone() {
        let (folder, members) = (place.path().join(id.to_string()), members.clone());
        let founding = Founding { cluster, id, layout, sessions: 4096, members };
        Home::create(&folder, &founding, Durability::Process)?;
        let config = Config::new(open("process://")?, transport.clone(), own.clone());
        let home = Home::open(&folder, Durability::Process)?;
        let (server, handle) = Server::start(home, config, Counter(0))?;
        transport.add(&own.address, &handle);
        running.push((server, handle));
    }
    let leads = |at: &usize| running[*at].1.status().role == RoleName::Leader;
    let leader = std::iter::repeat_with(|| (0..3).find(leads)).flatten().next().unwrap_or(0);
    let session = running[leader].1.session(Duration::from_secs(5))?;
    for number in 1..=3 {
        let reply =
            running[leader].1.call(session, number, b"five!".into(), Duration::from_secs(5));
        println!("{:?}", reply?.bytes);
    }
    Ok(())
}
