//! The items, by subject.

/// Hands the list of items to another macro: the one place where they are listed.
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_items {
    ([$($then:tt)+], $arguments:tt) => {
        $($then)+! { $arguments
            connection {
                a_pair_connects_and_both_ends_are_ready,
                queue_pair_numbers_are_unique,
                posting_before_connecting_is_refused,
                connecting_twice_is_refused,
                waiting_for_nobody_times_out,
                wait_connected_returns_when_the_peer_connects,
                damaged_connection_data_never_connects,
                posting_after_an_error_is_refused,
                an_orderly_disconnect_ends_the_peers_work,
                reconnecting_after_an_error_works,
                dropping_with_outstanding_work_is_harmless,
            }
            ordering {
                a_write_is_placed_before_its_completion,
                a_write_is_placed_before_the_immediate_after_it,
                interleaved_operations_complete_in_post_order,
                a_read_sees_the_writes_before_it,
                messages_arrive_in_the_order_sent,
                a_list_is_posted_whole_and_in_order,
                posts_that_are_held_arrive_in_order_once_released,
            }
            data {
                an_immediate_arrives_with_the_length_written,
                a_write_with_immediate_consumes_one_receive,
                a_send_carries_bytes_and_perhaps_an_immediate,
                inline_data_may_change_after_the_post,
                too_much_inline_data_is_refused,
                a_gather_list_is_placed_without_gaps,
                a_gather_list_beyond_the_limit_is_refused,
                operations_of_no_bytes_complete,
                the_first_and_the_last_byte_of_a_region_can_be_reached,
                silent_success_stays_silent,
                silent_failure_is_not_silent,
                words_are_placed_whole_wherever_their_bytes_come_from,
            }
            bounds {
                a_write_past_the_end_is_refused,
                an_offset_that_wraps_around_is_refused,
                a_read_past_the_end_is_refused,
                an_atomic_past_the_end_is_refused,
                a_flush_past_the_end_is_refused,
                an_unknown_key_is_refused,
                the_key_of_another_node_is_refused,
                a_key_of_another_protection_domain_is_refused,
                the_key_of_a_dropped_region_is_refused,
                writing_without_the_right_is_refused,
                reading_without_the_right_is_refused,
                atomics_without_the_right_are_refused,
                an_unaligned_atomic_is_an_invalid_request,
                a_part_of_an_object_is_reached_and_nothing_beside_it,
                local_ranges_outside_their_region_are_refused,
                results_need_the_right_to_write_locally,
            }
            death {
                the_death_of_a_peer_ends_outstanding_work,
                the_death_of_a_peer_in_the_middle_of_transfers_ends_them,
                the_death_of_one_peer_leaves_the_others_alone,
                an_idle_peers_death_is_noticed,
                a_disconnecting_peer_process_ends_outstanding_work,
            }
            revocation {
                a_revoked_region_keeps_its_contents_and_refuses_peers,
                revoking_one_region_leaves_the_others_alone,
                a_revoked_region_still_serves_its_owner,
                a_region_revoked_from_a_peer_stopped_in_a_write_stays_unchanged,
                a_queue_pair_revoked_from_a_peer_stopped_in_a_write_protects_all_memory,
                revoking_a_queue_pair_ends_it_and_flushes_its_work,
                results_and_messages_that_arrive_during_a_revocation_are_there,
                atomics_of_others_during_a_revocation_are_all_counted,
            }
            completions {
                every_completion_carries_the_context_of_its_queue_pair,
                a_shared_receive_carries_the_context_of_the_queue_pair_that_took_it,
            }
            receive {
                a_send_without_a_receive_fails_within_the_bound,
                an_immediate_without_a_receive_fails_within_the_bound,
                a_receive_posted_in_time_lets_the_waiting_send_through,
                receives_posted_before_connecting_count,
                a_message_longer_than_its_receive_fails_at_both_ends,
                a_receive_without_a_buffer_takes_no_bytes,
                a_full_receive_queue_refuses_and_posts_nothing,
                a_shared_receive_queue_serves_all_its_queue_pairs,
                a_broken_queue_pair_leaves_the_shared_receives_to_the_others,
                a_dropped_queue_pair_leaves_the_shared_receives_to_the_others,
                a_receive_posted_after_an_error_is_refused,
                a_waiting_send_takes_a_shared_receive_posted_in_time,
                an_error_flushes_posted_receives_in_order,
            }
            atomics {
                atomics_return_the_old_value,
                atomics_of_many_connections_lose_nothing,
                atomics_under_contention_of_threads_are_exact,
                atomics_and_reads_and_writes_keep_their_order,
                atomics_are_atomic_with_what_the_device_says,
            }
            flush {
                a_visible_flush_completes_after_placement,
                a_persistent_flush_of_volatile_memory_fails,
                a_persistent_flush_of_durable_memory_succeeds,
                a_flush_of_one_region_leaves_another_alone,
            }
            flow {
                a_full_send_queue_refuses_the_whole_post,
                an_overrun_completion_queue_says_so_or_loses_nothing,
                one_sided_operations_complete_though_the_target_never_polls,
                a_small_polling_slice_gets_everything_in_the_end,
            }
            events {
                an_armed_queue_wakes_for_a_completion,
                an_idle_armed_queue_sleeps,
                acknowledging_clears_the_event,
                waiting_ends_with_a_completion_or_the_time_out,
                single_threaded_ping_pong_loses_no_wake_up,
                thousands_of_rounds_between_threads_lose_no_wake_up,
            }
            scale {
                many_queue_pairs_work_side_by_side,
                a_large_transfer_arrives_intact_both_ways,
                a_message_of_the_longest_length_arrives,
                many_threads_work_with_queue_pairs_of_their_own,
            }
            model {
                random_sequences_do_what_the_model_does,
            }
        }
    };
}

macro_rules! table {
    (() $($group:ident { $($name:ident),+ $(,)? })+) => {
        $(mod $group;)+

        /// Every item with its name.
        pub const ITEMS: &[(&str, crate::Item)] =
            &[$($((stringify!($name), $group::$name)),+),+];
    };
}

crate::conformance_items!([table], ());
