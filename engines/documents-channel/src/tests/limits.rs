//! Clients that keep every rule and ask for too much: what they make the server keep is bounded, and
//! others are served.

use super::*;
use crate::message::{DataType, Part, granted};

/// A server with little room, and a client beside the greedy ones.
fn narrow() -> (World, ChannelClient) {
    let register = RegisterOptions { base_bytes: 64 << 10, ..RegisterOptions::default() };
    let options = ServerOptions {
        slots: 4,
        register,
        pool_buffers: 32,
        buffer_bytes: 4096,
        most_open: 8,
        most_unsent: 256 << 10,
        most_held: 1 << 20,
        most_bodies: 512 << 10,
        longest_body: 256 << 10,
        ..ServerOptions::default()
    };
    let mut world = World::new(options);
    let client = ClientOptions { slots: 4, register, ..ClientOptions::default() };
    let good = world.connect(1, &client);
    (world, good)
}

/// How many of its messages a greedy client sent, and how many slots it was given back.
#[derive(Default)]
struct Credits {
    sent: u64,
    acknowledged: u64,
    /// Messages of the server's that came, as errors.
    messages: u64,
    broken: bool,
}

impl Raw {
    /// Takes what arrived, and acknowledges messages.
    fn look(&mut self, credits: &mut Credits) {
        let mut seen = [WorkCompletion::EMPTY; 64];
        let count = self.queue.poll(&mut seen).unwrap();
        for one in &seen[..count] {
            credits.broken |= !one.is_success();
            let Some(immediate) = one.immediate.filter(|_| one.is_success()) else { continue };
            self.qp.post_receive(&[ReceiveRequest { wr_id: 0, buffer: None }]).unwrap();
            match Immediate::of(immediate) {
                Immediate::Acknowledge => credits.acknowledged += 1,
                Immediate::Message => {
                    credits.messages += 1;
                    self.write(b"", self.theirs, Some(Immediate::Acknowledge.code()));
                }
                Immediate::Data(_) => {}
            }
        }
    }

    /// Sends a message where there is a slot for it.
    fn send(&mut self, credits: &mut Credits, message: &Message<'_>) -> bool {
        if credits.broken || credits.sent - credits.acknowledged >= 4 {
            return false;
        }
        let mut out = [0; SLOT_BYTES];
        let bytes = message.write(&mut out).unwrap();
        let slot = self.theirs.advanced(credits.sent % 4 * SLOT_BYTES as u64);
        self.write(bytes, slot, Some(Immediate::Message.code()));
        credits.sent += 1;
        true
    }
}

fn to_window(kind: MessageType, index: u32, bytes: u64) -> Message<'static> {
    Message { address: 8192, bytes, key: REGION_KEY, ..Message::new(kind, index) }
}

/// Lets the greedy client do as it likes for a while.
fn turns(
    world: &mut World,
    raw: &mut Raw,
    credits: &mut Credits,
    mut message: impl FnMut(u64) -> Option<Message<'static>>,
) {
    for _ in 0..400 {
        if let Some(next) = message(credits.sent) {
            raw.send(credits, &next);
        }
        world.sim.run_for(Duration::from_micros(20));
        world.serve();
        raw.look(credits);
    }
}

fn is_served(world: &mut World, good: &mut ChannelClient) {
    for length in [10, 5000, 100_000] {
        let body = pattern(length);
        assert_eq!(world.call(good, MessageType::Insert, &body), Ok(body));
    }
    let found = world.call(good, MessageType::Query, &200_000_u64.to_le_bytes()).unwrap();
    assert!(found == pattern(200_000));
}

#[test]
pub(super) fn a_flood_of_requests_waits_in_its_ring_and_loses_nothing() {
    let (mut world, mut good) = narrow();
    let mut raw = Raw::connect(&mut world, 2);
    let mut credits = Credits::default();
    turns(&mut world, &mut raw, &mut credits, |sent| {
        Some(to_window(MessageType::Update, sent as u32, 4096))
    });
    // Eight are kept, and as many as there are slots wait in them.
    assert_eq!(world.echo.kept.len(), 8);
    assert_eq!((credits.sent, credits.acknowledged), (12, 8));
    assert!(world.server.counters().parked > 0);
    is_served(&mut world, &mut good);
    // Each answer makes room for one more; all of them are executed in the end.
    let mut answered = 0;
    while answered < 100 {
        for (channel, index, body) in std::mem::take(&mut world.echo.kept) {
            assert_eq!(index, answered, "in the order they came");
            answered += 1;
            world.server.respond(channel, index, &body, &mut world.echo);
        }
        turns(&mut world, &mut raw, &mut credits, |sent| {
            (sent < 100).then(|| to_window(MessageType::Update, sent as u32, 4096))
        });
        assert!(world.echo.kept.len() <= 8);
    }
    assert_eq!((credits.sent, credits.acknowledged, credits.broken), (100, 100, false));
    assert_eq!(world.server.kept_bytes(), 0);
}

#[test]
fn a_client_that_writes_into_slots_it_was_not_given_back_ends() {
    let (mut world, mut good) = narrow();
    let mut raw = Raw::connect(&mut world, 2);
    let mut credits = Credits::default();
    let update = |sent| Some(to_window(MessageType::Update, sent as u32, 4096));
    turns(&mut world, &mut raw, &mut credits, update);
    assert_eq!((world.server.channels(), world.echo.kept.len()), (2, 8));
    credits.acknowledged += 1;
    turns(&mut world, &mut raw, &mut credits, update);
    assert_eq!((world.server.channels(), world.server.counters().protocol_errors), (1, 1));
    is_served(&mut world, &mut good);
}

#[test]
fn long_replies_that_nobody_fetches_go_where_others_need_the_room() {
    let (mut world, mut good) = narrow();
    let mut greedy: Vec<(Raw, Credits)> =
        (2..6).map(|node| (Raw::connect(&mut world, node), Credits::default())).collect();
    static LENGTH: [u8; 8] = 100_000_u64.to_le_bytes();
    for (raw, credits) in &mut greedy {
        // The first part alone is fetched of each.
        turns(&mut world, raw, credits, |sent| {
            let query = to_window(MessageType::Query, sent as u32, 4096);
            (sent < 40).then_some(Message { body: &LENGTH, ..query })
        });
        assert_eq!(credits.sent, 40);
        assert!(world.server.kept_bytes() <= 1 << 20, "{}", world.server.kept_bytes());
    }
    assert!(world.server.kept_bytes() > 900_000);
    is_served(&mut world, &mut good);
    assert!(world.server.counters().dropped_replies > 100);
    assert_eq!(world.server.channels(), 5, "who keeps the rules stays");
}

#[test]
fn bodies_that_are_never_whole_give_way_to_those_that_are() {
    let (mut world, mut good) = narrow();
    let mut greedy: Vec<(Raw, Credits)> =
        (2..6).map(|node| (Raw::connect(&mut world, node), Credits::default())).collect();
    for (raw, credits) in &mut greedy {
        turns(&mut world, raw, credits, |sent| {
            let part = to_window(MessageType::Insert, 1, 4096);
            static PLACE: std::sync::OnceLock<[u8; 16]> = std::sync::OnceLock::new();
            let body = PLACE.get_or_init(|| granted(0, 32 << 10));
            let part = Message { data_type: DataType::GrantedPart, body, ..part };
            (sent < 7).then_some(part)
        });
        assert!(world.server.kept_bytes() <= 512 << 10, "{}", world.server.kept_bytes());
    }
    is_served(&mut world, &mut good);
    assert!(world.server.kept_bytes() <= 512 << 10);
    // What began and does not go on ends with its time.
    world.sim.run_for(Duration::from_secs(31));
    world.server.expire(&mut world.echo);
    world.sim.run_for(Duration::from_secs(31));
    world.server.expire(&mut world.echo);
    assert_eq!((world.server.channels(), world.server.kept_bytes()), (1, 0));
    is_served(&mut world, &mut good);
}

#[test]
pub(super) fn the_rest_of_a_reply_waits_behind_the_last_part_that_was_asked_for() {
    let (mut world, _good) = narrow();
    let mut raw = Raw::connect(&mut world, 2);
    let mut credits = Credits::default();
    static LENGTH: [u8; 8] = 50_000_u64.to_le_bytes();
    let query = to_window(MessageType::Query, 9, 4096);
    raw.send(&mut credits, &Message { body: &LENGTH, ..query });
    turns(&mut world, &mut raw, &mut credits, |_| None);
    // Seven parts, twenty seconds apart: longer than the hold in all.
    for part in 1..8_u32 {
        world.sim.run_for(Duration::from_secs(20));
        world.server.expire(&mut world.echo);
        raw.send(&mut credits, &to_window(MessageType::Continue, 9, 4096));
        turns(&mut world, &mut raw, &mut credits, |_| None);
        let mut head = [0; Part::BYTES];
        beeline_os::memory::copy_out(raw.window.memory().as_ref(), 8192, &mut head);
        let offset = part * (4096 - Part::BYTES as u32);
        assert_eq!(Part::decode(head).map(|part| part.offset), Some(offset));
        assert_eq!(credits.messages, 0);
    }
    world.sim.run_for(Duration::from_secs(31));
    world.server.expire(&mut world.echo);
    assert_eq!((world.server.kept_bytes(), world.server.counters().dropped_replies), (0, 1));
    raw.send(&mut credits, &to_window(MessageType::Continue, 9, 4096));
    turns(&mut world, &mut raw, &mut credits, |_| None);
    assert_eq!(credits.messages, 1, "the client is told");
}

#[test]
fn a_client_that_takes_no_writes_loses_its_channel_where_buffers_are_scarce() {
    let (mut world, mut good) = narrow();
    let mut raw = Raw::connect(&mut world, 2);
    let mut credits = Credits::default();
    static LENGTH: [u8; 8] = 30_000_u64.to_le_bytes();
    // It takes what comes, and posts no receive again: 64 writes reach it.
    let mut seen = [WorkCompletion::EMPTY; 64];
    for _ in 0..200 {
        let query = to_window(MessageType::Query, credits.sent as u32, 32 << 10);
        raw.send(&mut credits, &Message { body: &LENGTH, ..query });
        world.sim.run_for(Duration::from_micros(20));
        world.serve();
        let count = raw.queue.poll(&mut seen).unwrap();
        let acknowledge = Some(Immediate::Acknowledge.code());
        let came = seen[..count].iter().filter(|one| one.immediate == acknowledge).count();
        credits.acknowledged += came as u64;
    }
    let (kept, idle) = (world.server.kept_bytes(), world.server.idle_buffers());
    assert!(kept > 0 && idle <= 8, "{kept} bytes kept, {idle} buffers idle");
    for _ in 0..4 {
        world.sim.run_for(Duration::from_millis(600));
        world.serve();
        world.server.expire(&mut world.echo);
    }
    assert_eq!((world.server.channels(), world.server.kept_bytes()), (1, 0));
    is_served(&mut world, &mut good);
}

#[test]
fn a_reply_that_was_kept_goes_with_its_leave_or_gives_way_to_another() {
    let (mut world, mut good) = narrow();
    let first = good.submit(MessageType::Update, b"n", b"1", (0, 0), LIMIT).unwrap();
    let second = good.submit(MessageType::Update, b"n", b"2", (0, 0), LIMIT).unwrap();
    world.settle(&mut [&mut good]);
    let kept = std::mem::take(&mut world.echo.kept);
    for (channel, index, _) in &kept {
        world.server.keep(*channel, *index, &pattern(9000), &mut world.echo);
    }
    world.settle(&mut [&mut good]);
    assert!(good.take_outcome().is_none());
    assert!(world.server.kept_bytes() >= 18_000);
    world.server.release(kept[1].0, kept[1].1, &mut world.echo);
    world.server.respond(kept[0].0, kept[0].1, b"no", &mut world.echo);
    for _ in 0..10 {
        world.settle(&mut [&mut good]);
    }
    let mut outcomes: Vec<_> = std::iter::from_fn(|| good.take_outcome()).collect();
    outcomes.sort_by_key(|(index, _)| *index);
    assert_eq!(outcomes, [(first, Ok(b"no".to_vec())), (second, Ok(pattern(9000)))]);
    assert_eq!(world.server.kept_bytes(), 0);
}

#[test]
fn a_channel_that_its_server_ended_is_found_broken_before_a_request_is_sent() {
    let (mut world, mut good) = narrow();
    assert!(good.is_alive());
    let sent = good.counters().writes;
    world.server.shut_down(&mut world.echo);
    world.sim.run_for(Duration::from_secs(1));
    let refused = good.submit(MessageType::Insert, b"n", b"x", (0, 0), LIMIT);
    assert_eq!(refused, Err(Submit::Broken));
    assert_eq!((good.counters().writes, good.is_broken()), (sent, true));
}
