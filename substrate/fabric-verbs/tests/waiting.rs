//! How long sends wait for receives where the library keeps the time. Skipped, with the reason, where
//! there is no RDMA device.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends where its set-up breaks")]

mod common;

use std::time::{Duration, Instant};

use beeline_fabric::{
    LocalData, Operation, QueuePairOptions, QueuePairState, ReceiveRequest, Status, WorkRequest,
};
use common::{linked, write};

/// Beyond what the device counts by itself.
const WATCHED: Duration = Duration::from_millis(4_500);

fn watched() -> QueuePairOptions {
    QueuePairOptions { receiver_not_ready_timeout: WATCHED, ..QueuePairOptions::default() }
}

fn to_nobody() -> Operation<'static> {
    Operation::Send { local: LocalData::Inline(b"nobody"), immediate: None }
}

#[test]
fn a_wait_for_a_receive_beyond_the_devices_reach_is_kept_by_the_library() {
    let Some((mut a, _b, _turn)) = linked(watched()) else { return };
    let begun = Instant::now();
    a.pair.post_send(&[WorkRequest::new(7, to_nobody())]).unwrap();
    let done = a.one();
    assert_eq!((done.wr_id, done.status), (7, Status::ReceiverNotReady));
    assert!(begun.elapsed() >= Duration::from_millis(4_400), "{:?}", begun.elapsed());
    assert_eq!(a.pair.state(), QueuePairState::Error);
}

#[test]
fn a_send_behind_silent_writes_does_not_wait_for_ever() {
    let Some((mut a, b, _turn)) = linked(watched()) else { return };
    let target = b.region(64);
    a.pair
        .post_send(&[
            WorkRequest::unsignalled(1, write(&target, b"silent")),
            WorkRequest::unsignalled(2, write(&target, b"as well")),
            WorkRequest::new(3, to_nobody()),
        ])
        .unwrap();
    let done = a.one();
    assert_eq!((done.wr_id, done.status), (3, Status::ReceiverNotReady));
}

#[test]
fn a_send_that_arrived_breaks_nothing_however_late_its_completion_is_looked_at() {
    let Some((mut a, mut b, _turn)) = linked(watched()) else { return };
    let target = b.region(64);
    for wr_id in 0..2 {
        b.pair.post_receive(&[ReceiveRequest { wr_id, buffer: None }]).unwrap();
    }
    let nothing = LocalData::Inline(b"");
    let notice = Operation::Send { local: nothing, immediate: Some(1) };
    // One that is reported, one that is silent; both are taken at once and polled by nobody.
    a.pair.post_send(&[WorkRequest::new(1, notice)]).unwrap();
    a.pair.post_send(&[WorkRequest::unsignalled(2, notice)]).unwrap();
    assert!(b.one().is_success() && b.one().is_success());
    std::thread::sleep(WATCHED + Duration::from_millis(2_500));
    assert_eq!(a.pair.state(), QueuePairState::ReadyToSend);
    let done = a.one();
    assert_eq!((done.wr_id, done.status), (1, Status::Success));
    a.pair.post_send(&[WorkRequest::new(3, write(&target, b"goes on"))]).unwrap();
    let done = a.one();
    assert_eq!((done.wr_id, done.status), (3, Status::Success));
    assert_eq!(a.pair.state(), QueuePairState::ReadyToSend);
}
