//! A replicated counter: three members in one process, found through the bootstrap exchange.
//!
//! `cargo run -p beeline-verify-log --example counter`. Members on several machines are the same,
//! one per process, with addresses that the others reach and `verbs` or `tcp` for `shm`.

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric_open::{Bootstrap, BootstrapConfig, open};
use beeline_replicated_log::{
    ClusterId, Config, Contact, Durability, Founding, Home, Layout, NodeId, Position, RoleName,
    Server, SnapshotWriter, StateMachine,
};
use beeline_verify_log::bootstrap::{ToMembers, service};

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

fn main() -> Result<(), Box<dyn Error>> {
    let place = tempfile::tempdir()?;
    let address = |id: u16| ([127, 0, 0, 1], 47_900 + id).into();
    let contact = |id| Contact {
        address: std::net::SocketAddr::to_string(&address(id)),
        details: Vec::new(),
    };
    let members: Vec<_> = (1..=3).map(|id| (NodeId(id), contact(id))).collect();
    let mut running = Vec::new();
    for id in 1..=3 {
        let folder = place.path().join(id.to_string());
        let (cluster, layout) = (ClusterId(2024), Layout::new(1024, 2048)?);
        let (id_of, members) = (NodeId(id), members.clone());
        let founding = Founding { cluster, id: id_of, layout, sessions: 4096, members };
        Home::create(&folder, &founding, Durability::Process)?;
        let home = Home::open(&folder, Durability::Process)?;
        let device = open("shm://")?;
        let config = Config::new(device.clone(), Arc::new(ToMembers::new("shm")), contact(id));
        let (server, handle) = Server::start(home, config, Counter(0))?;
        let listen = BootstrapConfig { tcp: Some(address(id)), ..BootstrapConfig::default() };
        let door = Bootstrap::listen(listen, vec![device], vec![service(handle.clone())])?;
        running.push((server, handle, door));
    }
    let leads =
        || running.iter().map(|(_, log, _)| log).find(|log| log.status().role == RoleName::Leader);
    let leader = loop {
        match leads() {
            Some(leader) => break leader,
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let limit = Duration::from_secs(5);
    let session = leader.session(limit)?;
    for number in 1..=3 {
        let reply = leader.call(session, number, b"five!".to_vec(), limit)?;
        println!("at {}: {:?}", reply.position, reply.bytes.first());
    }
    Ok(())
}
