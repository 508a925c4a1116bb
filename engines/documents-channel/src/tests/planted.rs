//! Bugs put back, one at a time: the tests that hold the channel's promises fail with them.

use std::panic::catch_unwind;

use super::*;
use crate::planted::{PLANTED, Planted};

/// A bug, and a test that finds it.
const FOUND: [(Planted, fn()); 10] = [
    (
        Planted::SendWithoutCredit,
        a_slow_receiver_makes_the_sender_wait_and_loses_and_overwrites_nothing,
    ),
    (Planted::GiveSlotBackEarly, limits::a_flood_of_requests_waits_in_its_ring_and_loses_nothing),
    (
        Planted::FreePieceEarly,
        a_slow_receiver_makes_the_sender_wait_and_loses_and_overwrites_nothing,
    ),
    (
        Planted::ReuseLateDestination,
        a_write_that_comes_after_its_time_out_hits_a_buffer_nobody_uses,
    ),
    (
        Planted::BelieveDestination,
        destinations_outside_the_clients_region_and_broken_messages_are_refused,
    ),
    (
        Planted::ReuseBufferUnderWrite,
        a_slow_receiver_makes_the_sender_wait_and_loses_and_overwrites_nothing,
    ),
    (
        Planted::ForgetBrokenRequests,
        a_connection_that_breaks_ends_every_request_once_and_gives_every_buffer_back,
    ),
    (Planted::IgnoreChecksum, a_flipped_bit_is_found_in_validation_mode_and_only_there),
    (Planted::BelieveAcknowledgement, a_client_that_breaks_the_rules_ends_its_own_channel_alone),
    (
        Planted::KeepRestForEver,
        limits::the_rest_of_a_reply_waits_behind_the_last_part_that_was_asked_for,
    ),
];

#[test]
fn bugs_that_are_put_back_are_found() {
    let missed: Vec<Planted> = FOUND
        .into_iter()
        .filter(|(bug, test)| {
            PLANTED.set(Some(*bug));
            let found = catch_unwind(test).is_err();
            PLANTED.set(None);
            !found
        })
        .map(|(bug, _)| bug)
        .collect();
    assert!(missed.is_empty(), "no test finds {missed:?}");
}
