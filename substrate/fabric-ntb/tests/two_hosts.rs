//! Two virtual machines and the window between them, in the lab: `LAB_WINDOW` names the window's
//! file, `LAB_GUEST` which end this is, `LAB_SELF` and `LAB_PEER` the addresses over which the two
//! exchange connection data. Elsewhere it says that it is skipped.

#![allow(clippy::unwrap_used, reason = "a test ends where its set-up breaks")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, ConnectInfo, Device as _, FlushKind, LocalData, Operation, QueuePairOptions,
    ReceiveRequest, RemoteAddress, RemoteKey, Role, ScatterGatherEntry, Status, WorkCompletion,
    WorkRequest,
};
use beeline_fabric_ntb::{FixedWindow, NtbConfig, NtbDevice, Port, Portion, Side};
use beeline_os::memory::{copy_in, copy_out, load_u64};

const BOUND: Duration = Duration::from_secs(60);
const PORT: u16 = 4791;

fn meet(guest: u8) -> Option<TcpStream> {
    let (own, peer) = (std::env::var("LAB_SELF").ok()?, std::env::var("LAB_PEER").ok()?);
    if guest == 0 {
        let listener = TcpListener::bind((own.as_str(), PORT)).unwrap();
        return Some(listener.accept().unwrap().0);
    }
    let begun = Instant::now();
    loop {
        match TcpStream::connect((peer.as_str(), PORT)) {
            Ok(stream) => return Some(stream),
            Err(error) => assert!(begun.elapsed() < BOUND, "the other guest: {error}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn exchange(stream: &mut TcpStream, own: &[u8]) -> Vec<u8> {
    stream.write_all(&(own.len() as u32).to_le_bytes()).unwrap();
    stream.write_all(own).unwrap();
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn two_guests_reach_each_other_through_the_window() {
    let window = std::env::var_os("LAB_WINDOW").map(PathBuf::from);
    let guest = std::env::var("LAB_GUEST").ok().and_then(|guest| guest.parse::<u8>().ok());
    let (Some(inbound), Some(guest)) = (window, guest) else {
        let reason = "no window between two virtual machines here; the lab has one";
        let _ = writeln!(std::io::stderr(), "two_hosts ... skipped: {reason}");
        return;
    };
    let Some(mut stream) = meet(guest) else { return };
    let side = if guest == 0 { Side::First } else { Side::Second };
    let port = Port::Fixed(FixedWindow { inbound, outbound: None, side, portion: Portion::WHOLE });
    let device = NtbDevice::open(NtbConfig { port, ..NtbConfig::default() }).unwrap();
    let domain = device.allocate_protection_domain().unwrap();
    let queue = device.create_completion_queue(256).unwrap();
    let options = QueuePairOptions::default();
    let mut pair = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
    let register =
        |bytes| domain.register(device.allocate_memory(bytes).unwrap(), Access::all()).unwrap();
    let (target, local) = (register(1 << 20), register(1 << 20));
    let receive = ReceiveRequest { wr_id: 77, buffer: None };
    pair.post_receive(&[receive]).unwrap();
    let peer = ConnectInfo(exchange(&mut stream, &pair.connect_info().0));
    let key = exchange(&mut stream, &target.remote_key().0.to_le_bytes());
    let key = RemoteKey(u64::from_le_bytes(key.try_into().unwrap()));
    pair.connect(&peer, if guest == 0 { Role::Active } else { Role::Passive }).unwrap();
    pair.wait_connected(BOUND).unwrap();
    let one = || {
        let mut one = [WorkCompletion::EMPTY];
        assert_eq!(queue.wait(&mut one, BOUND).unwrap(), 1, "a completion within the bound");
        one[0]
    };
    let remote = |offset| RemoteAddress { key, offset };
    // Both at once: a mebibyte there, back, and compared.
    let pattern: Vec<u8> =
        (0..1_u32 << 20).map(|i| (i % 249) as u8 ^ guest.wrapping_mul(0x55)).collect();
    copy_in(local.memory().as_ref(), 0, &pattern);
    let entry = ScatterGatherEntry { region: &local, offset: 0, length: 1 << 20 };
    let flush = Operation::Flush { remote: remote(0), length: 1 << 20, kind: FlushKind::Visible };
    let write = Operation::Write { local: LocalData::Gather(&[entry]), remote: remote(0) };
    pair.post_send(&[WorkRequest::unsignalled(1, write), WorkRequest::new(2, flush)]).unwrap();
    assert_eq!((one().status, 2), (Status::Success, 2));
    copy_in(local.memory().as_ref(), 0, &vec![0; 1 << 20]);
    let read = Operation::Read { local: entry, remote: remote(0) };
    pair.post_send(&[WorkRequest::new(3, read)]).unwrap();
    assert_eq!(one().status, Status::Success);
    let mut seen = vec![0; 1 << 20];
    copy_out(local.memory().as_ref(), 0, &mut seen);
    assert!(seen == pattern, "a mebibyte there and back");
    // Both have read back before either counts on the same memory.
    exchange(&mut stream, b"read");
    let word = ScatterGatherEntry { region: &local, offset: 0, length: 8 };
    let begun = Instant::now();
    for round in 0..200_u64 {
        let add = Operation::FetchAndAdd { local: word, remote: remote(8), addend: 1 };
        pair.post_send(&[WorkRequest::new(round, add)]).unwrap();
        let done = one();
        assert_eq!((done.wr_id, done.status), (round, Status::Success));
    }
    let each_us = begun.elapsed().as_micros() / 200;
    let mut start = [0; 8];
    start.copy_from_slice(&seen[8..16]);
    assert_eq!(load_u64(local.memory().as_ref(), 0) % 256, (u64::from_le_bytes(start) + 199) % 256);
    let _ = writeln!(std::io::stderr(), "guest {guest}: fetch-and-add in {each_us} us");
    exchange(&mut stream, b"added");
    let immediate = u32::from(guest);
    let notice = Operation::WriteWithImmediate {
        local: LocalData::Inline(b"bye"),
        remote: remote(0),
        immediate,
    };
    pair.post_send(&[WorkRequest::new(9, notice)]).unwrap();
    let mut seen = [one(), one()];
    seen.sort_by_key(|completion| completion.wr_id);
    assert!(seen.iter().all(WorkCompletion::is_success));
    assert_eq!((seen[0].wr_id, seen[1].wr_id), (9, 77));
    assert_eq!(seen[1].immediate, Some(1 - immediate));
    // The first guest leaves; the second sees its connection end. It may hear of it before it goes on here.
    if guest == 1 {
        pair.post_receive(&[ReceiveRequest { wr_id: 5, buffer: None }]).unwrap();
    }
    exchange(&mut stream, b"done");
    if guest == 1 {
        let ended = one();
        assert_eq!(ended.wr_id, 5);
        assert!(!ended.is_success(), "the peer is gone: {ended:?}");
    }
}
