//! What members of a cluster tell each other through the log.

use beeline_replicated_service::Tag;
use beeline_replicated_service::unit::{
    HEAD_BYTES, LaneName, Turn, Unit, parts, put_head, put_part,
};

/// A unit, as a replica takes it out of the log: its requests lie in it, in order, and what is damaged ends them.
pub fn unit(bytes: &[u8]) -> bool {
    let Ok(unit) = Unit::decode(bytes) else { return false };
    let requests: Vec<&[u8]> = unit.requests().collect();
    let told: usize = requests.iter().map(|request| 4 + request.len()).sum();
    assert!(told <= bytes.len(), "no byte is two requests'");
    // Written again they are the same, with the head's fields.
    let mut again = vec![0; HEAD_BYTES];
    put_head(&mut again, unit.lane, unit.format, unit.turn);
    for request in &requests {
        put_part(&mut again, |out| out.extend_from_slice(request));
    }
    let copy = Unit::decode(&again).expect("what was written");
    assert_eq!((copy.lane, copy.format, copy.turn), (unit.lane, unit.format, unit.turn));
    assert!(copy.requests().eq(requests.iter().copied()), "the same requests");
    assert_eq!(parts(&again[HEAD_BYTES..]).count(), requests.len());
    assert_eq!(Turn::decode(&unit.turn.encode()), Some(unit.turn));
    let _ = unit.lane.key();
    !requests.is_empty()
}

pub fn unit_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (service, requests) in [(0, 1), (1, 3), (7, 20)] {
        let mut bytes = vec![0; HEAD_BYTES];
        let lane = LaneName { service: Tag(service), node: 3, lane: 1 };
        put_head(&mut bytes, lane, 5, Turn { incarnation: 1 << 40, number: 9 });
        for request in 0..requests {
            put_part(&mut bytes, |out| out.extend(std::iter::repeat_n(b'r', request * 7)));
        }
        seeds.push(bytes);
    }
    // Of the first version.
    let mut first = vec![0; 32];
    first[0] = 1;
    put_part(&mut first, |out| out.extend_from_slice(b"one"));
    seeds.push(first);
    seeds
}
