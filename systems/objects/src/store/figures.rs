//! What the store counts.

beeline_observe::metrics! {
    /// The object store of a node.
    pub struct ObjectMetrics in "beeline" {
        gauge objects_clients: Count, "Processes connected to the object store.";
        gauge objects_objects: Count, "Objects that a client finds, spilled ones included.";
        gauge objects_doomed_objects: Count, "Objects deleted and still referenced.";
        gauge objects_waiting_requests: Count, "Requests that wait for an object or for memory.";
        gauge objects_segments: Count, "Segments of memory.";
        gauge objects_segment_bytes: Bytes, "Memory of all segments.";
        gauge objects_used_bytes: Bytes, "Of these, bytes of objects.";
        gauge objects_reserved_bytes: Bytes, "Of these, bytes that clients reserved for small objects to come.";
        gauge objects_retiring_bytes: Bytes, "Of these, bytes that clients have yet to unmap.";
        gauge objects_limit_bytes: Bytes, "Memory the segments may take.";
        gauge objects_table_bytes: Bytes, "Bytes of the table's entries, 256 an object; beyond a sixteenth of the limit they count against it.";
        gauge objects_disk_bytes: Bytes, "Bytes of objects on disk.";
        counter objects_creates: Count, "Objects created.";
        counter objects_refused_creates: Count, "Creates that found no memory within their time-out.";
        counter objects_seals: Count, "Objects sealed.";
        counter objects_sealed_bytes: Bytes, "Bytes of the objects sealed.";
        counter objects_reserved_puts: Count, "Of the objects sealed, small ones put by one request into memory reserved before.";
        counter objects_aborts: Count, "Objects given up unsealed, by their creator or by its death.";
        counter objects_gets: Count, "Gets.";
        counter objects_hits: Count, "Gets that were answered with an object.";
        counter objects_misses: Count, "Gets and fetches that found none within their time-out.";
        counter objects_deletes: Count, "Objects deleted by a client.";
        counter objects_evictions: Count, "Objects dropped to make room.";
        counter objects_spills: Count, "Objects written to disk to make room.";
        counter objects_spilled_bytes: Bytes, "Bytes of these.";
        counter objects_failed_spills: Count, "Files that could not be written. Not zero needs a person: look at the disk.";
        counter objects_restores: Count, "Objects read back from disk.";
        counter objects_lost_objects: Count, "Objects whose file could not be read back. Not zero needs a person.";
        counter objects_fetches: Count, "Objects asked of other nodes.";
        counter objects_failed_fetches: Count, "Of these, not to be had at any node.";
        counter objects_expelled_clients: Count, "Clients disconnected for breaking the protocol.";
    }
}

/// The counters of [`ObjectMetrics`], kept by the loop.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    pub(crate) creates: u64,
    pub(crate) refused_creates: u64,
    pub(crate) seals: u64,
    pub(crate) sealed_bytes: u64,
    pub(crate) reserved_puts: u64,
    pub(crate) aborts: u64,
    pub(crate) gets: u64,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) deletes: u64,
    pub(crate) evictions: u64,
    pub(crate) spills: u64,
    pub(crate) spilled_bytes: u64,
    pub(crate) failed_spills: u64,
    pub(crate) restores: u64,
    pub(crate) lost_objects: u64,
    pub(crate) fetches: u64,
    pub(crate) failed_fetches: u64,
    pub(crate) expelled: u64,
}

impl ObjectMetrics {
    /// Copies the figures of this moment.
    pub(crate) fn copy(&self, core: &super::core::Core) {
        let (memory, table, counters) = (core.memory(), core.table(), &core.counters);
        self.objects_clients.set(core.clients() as u64);
        self.objects_objects.set(table.count() as u64);
        self.objects_doomed_objects.set((table.held() - table.count()) as u64);
        self.objects_waiting_requests.set(core.waiting() as u64);
        self.objects_segments.set(memory.count() as u64);
        self.objects_segment_bytes.set(memory.total());
        self.objects_used_bytes.set(memory.used().saturating_sub(core.reserved_bytes()));
        self.objects_reserved_bytes.set(core.reserved_bytes());
        self.objects_retiring_bytes.set(memory.retiring());
        self.objects_limit_bytes.set(memory.limit());
        self.objects_table_bytes.set(core.table_bytes());
        self.objects_disk_bytes.set(core.spilled_bytes());
        self.objects_creates.publish(counters.creates);
        self.objects_refused_creates.publish(counters.refused_creates);
        self.objects_seals.publish(counters.seals);
        self.objects_sealed_bytes.publish(counters.sealed_bytes);
        self.objects_reserved_puts.publish(counters.reserved_puts);
        self.objects_aborts.publish(counters.aborts);
        self.objects_gets.publish(counters.gets);
        self.objects_hits.publish(counters.hits);
        self.objects_misses.publish(counters.misses);
        self.objects_deletes.publish(counters.deletes);
        self.objects_evictions.publish(counters.evictions);
        self.objects_spills.publish(counters.spills);
        self.objects_spilled_bytes.publish(counters.spilled_bytes);
        self.objects_failed_spills.publish(counters.failed_spills);
        self.objects_restores.publish(counters.restores);
        self.objects_lost_objects.publish(counters.lost_objects);
        self.objects_fetches.publish(counters.fetches);
        self.objects_failed_fetches.publish(counters.failed_fetches);
        self.objects_expelled_clients.publish(counters.expelled);
    }
}
