//! The specification notices when a rule is broken: each planted bug makes the items that watch
//! for it fail, and only the bug does (the same items pass in `conformance.rs`).

#![allow(clippy::unwrap_used, reason = "a test ends where its harness breaks")]

mod common;

use beeline_fabric_conformance::{Context, Stop, item};
use beeline_fabric_sim::{PlantedBug, SimOptions};
use common::SimHarness;

fn run(name: &str, options: SimOptions) -> Result<(), Stop> {
    let harness = SimHarness::new(7, options);
    item(name).unwrap()(&Context::new(&harness, module_path!()))
}

fn catches(bug: PlantedBug, options: SimOptions, names: &[&str]) {
    for name in names {
        let healthy = run(name, options.clone());
        assert!(healthy.is_ok(), "{name} without a bug: {healthy:?}");
        let broken = run(name, SimOptions { planted_bug: Some(bug), ..options.clone() });
        assert!(matches!(broken, Err(Stop::Failed { .. })), "{name} overlooks {bug:?}");
    }
}

macro_rules! planted {
    ($($test:ident: $bug:ident, $options:expr, [$($item:ident),+ $(,)?];)+) => {$(
        #[test]
        fn $test() {
            catches(PlantedBug::$bug, $options, &[$(stringify!($item)),+]);
        }
    )+};
}

planted! {
    an_immediate_delivered_early_is_noticed: ImmediateBeforeWrite, SimOptions::default(), [
        a_write_is_placed_before_the_immediate_after_it,
        an_immediate_arrives_with_the_length_written,
        many_queue_pairs_work_side_by_side,
    ];
    unchecked_bounds_are_noticed: IgnoreBounds, SimOptions::default(), [
        a_write_past_the_end_is_refused,
        a_read_past_the_end_is_refused,
        an_atomic_past_the_end_is_refused,
        a_flush_past_the_end_is_refused,
        an_offset_that_wraps_around_is_refused,
        silent_failure_is_not_silent,
    ];
    unchecked_rights_are_noticed: IgnoreRights, SimOptions::default(), [
        writing_without_the_right_is_refused,
        reading_without_the_right_is_refused,
        atomics_without_the_right_are_refused,
    ];
    unchecked_domains_are_noticed: IgnoreDomain, SimOptions::default(), [
        a_key_of_another_protection_domain_is_refused,
    ];
    lost_wake_ups_are_noticed: LoseWakeUps, SimOptions::default(), [
        single_threaded_ping_pong_loses_no_wake_up,
        an_armed_queue_wakes_for_a_completion,
    ];
    a_flush_that_flushes_nothing_is_noticed: FlushWithoutPlacing, SimOptions::slow_placement(), [
        a_visible_flush_completes_after_placement,
        a_persistent_flush_of_durable_memory_succeeds,
        random_sequences_do_what_the_model_does,
    ];
    a_false_promise_of_persistence_is_noticed: PersistVolatile, SimOptions::default(), [
        a_persistent_flush_of_volatile_memory_fails,
    ];
    an_unnoticed_death_is_noticed: SilentPeerDeath, SimOptions::default(), [
        an_idle_peers_death_is_noticed,
        the_death_of_one_peer_leaves_the_others_alone,
    ];
    reordering_is_noticed: ReorderWithinQueuePair, SimOptions::default(), [
        messages_arrive_in_the_order_sent,
        interleaved_operations_complete_in_post_order,
        a_read_sees_the_writes_before_it,
        random_sequences_do_what_the_model_does,
    ];
    a_forgotten_revocation_is_noticed: ForgetRevocation, SimOptions::default(), [
        a_revoked_region_keeps_its_contents_and_refuses_peers,
        a_region_revoked_from_a_peer_stopped_in_a_write_stays_unchanged,
        a_queue_pair_revoked_from_a_peer_stopped_in_a_write_protects_all_memory,
    ];
    lost_additions_are_noticed: TornAtomics, SimOptions::default(), [
        atomics_of_many_connections_lose_nothing,
        atomics_are_atomic_with_what_the_device_says,
        atomics_and_reads_and_writes_keep_their_order,
    ];
    a_queue_pair_that_outlives_its_error_is_noticed: StayAfterError, SimOptions::default(), [
        posting_after_an_error_is_refused,
        an_unknown_key_is_refused,
    ];
    work_that_vanishes_is_noticed: DropFlushed, SimOptions::default(), [
        an_orderly_disconnect_ends_the_peers_work,
        an_error_flushes_posted_receives_in_order,
        silent_failure_is_not_silent,
    ];
    a_forgotten_context_is_noticed: ForgetContext, SimOptions::default(), [
        every_completion_carries_the_context_of_its_queue_pair,
    ];
    late_inline_data_is_noticed: StaleInline, SimOptions::default(), [
        inline_data_may_change_after_the_post,
    ];
    a_silent_overrun_is_noticed: SilentOverrun, SimOptions::default(), [
        an_overrun_completion_queue_says_so_or_loses_nothing,
    ];
}
