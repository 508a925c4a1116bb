//! What the document store counts.

beeline_observe::metrics! {
    /// The document store.
    pub struct DocumentsMetrics in "beeline" {
        gauge documents_connections: Count, "MongoDB connections open.";
        counter documents_accepted_connections: Count, "MongoDB connections accepted.";
        counter documents_rejected_connections: Count, "MongoDB connections refused at the limit.";
        counter documents_commands: Count, "Commands executed.";
        counter documents_failed_commands: Count, "Commands answered with an error.";
        counter documents_protocol_errors: Count, "Connections closed for breaking the protocol.";
        counter documents_inserted: Count, "Documents inserted.";
        counter documents_updated: Count, "Documents changed.";
        counter documents_deleted: Count, "Documents deleted.";
        counter documents_returned: Count, "Documents sent to clients.";
        counter documents_examined: Count, "Documents looked at by queries and writes.";
        counter documents_expired: Count, "Documents deleted because the time of an index had come.";
        gauge documents_cursors: Count, "Cursors open.";
        counter documents_timed_out_cursors: Count, "Cursors closed because no client used them.";
        counter documents_input_bytes: Bytes, "Bytes read from MongoDB clients.";
        counter documents_output_bytes: Bytes, "Bytes sent to MongoDB clients.";
        gauge documents_channels: Count, "Clients connected over fabric.";
        counter documents_channel_requests: Count, "Commands that came over fabric.";
        counter documents_channel_request_bytes: Bytes, "Bytes of commands that came over fabric.";
        counter documents_channel_reply_bytes: Bytes, "Bytes of replies written to fabric clients.";
        counter documents_channel_staged_bytes: Bytes, "Bytes of those that took a second copy, because no registered buffer was idle.";
        counter documents_channel_refused_clients: Count, "Fabric clients that were told to use TCP.";
        counter documents_channel_ended_clients: Count, "Fabric clients whose channel ended.";
        counter documents_channel_protocol_errors: Count, "Channels ended because their client broke the protocol.";
        counter documents_channel_registrations: Count, "Regions registered for fabric clients; constant while they work.";
        gauge documents_channel_registered_bytes: Bytes, "Bytes registered for fabric clients.";
        gauge documents_channel_kept_bytes: Bytes, "Bytes that are kept for fabric clients: commands that are incomplete or wait, replies that wait.";
        counter documents_channel_parked_requests: Count, "Times a fabric client's request had to wait in its ring, because the client had too much under way.";
        counter documents_channel_overrun_clients: Count, "Fabric clients that lost their channel because they made the node keep most where there was no room, or took no replies.";
        counter documents_channel_dropped_replies: Count, "Rests of replies to fabric clients that were let go: the client did not ask for them in time, or there was no room.";
        counter documents_channel_sleeps: Count, "Times the thread of fabric clients went to sleep.";
        gauge documents_databases: Count, "Databases.";
        gauge documents_collections: Count, "Collections.";
        gauge documents_replica_state: Count, "What a member of a replica set does, as MongoDB numbers it: 1 primary, 2 secondary, 3 recovering, 5 copying, 9 taking back; 0 in a node by itself.";
        gauge documents_replica_term: Count, "The term of the replica set.";
        gauge documents_replica_lag_seconds: Seconds, "How far a secondary's documents are behind the primary's.";
        gauge documents_replica_terms_led: Count, "Terms this member led in since it started.";
        gauge documents_replica_applied_entries: Count, "Entries applied since the start that another member made.";
        gauge documents_replica_taken_back_entries: Count, "Entries taken back since the start: no majority had them. They are in files in the folder rollback of the data.";
        gauge documents_replica_copies: Count, "Times since the start that all documents were copied from another member.";
        gauge documents_replica_overdue_replies: Count, "Replies given up since the start while they waited for other members (wtimeout).";
    }
}
