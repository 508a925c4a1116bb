//! Single-producer rings over raw shared memory, and mailboxes between threads.
