//! Connections between hosts: rings mirrored over fabric (p. 4.6, 4.7, 4.10).
//!
//! Place: `systems`, above `sockets` (segments) and the traits of fabric. *Absent:* providers and
//! bootstrap (the edge of the program passes a [`network::Network`]), payload formats, programs.
//!
//! ```text
//!  program A ⇄ segment A ⇄ relay of host 1 ══ queue pair ══ relay of host 2 ⇄ segment B ⇄ program B
//!       └──────────────── the kernel's TCP connection, as always ───────────────────────┘
//! ```
//!
//! A segment has two ends: the program is end 0, the relay stands for the other. Ring 0 of A and
//! ring 1 of B are mirror images: same size, same positions. What A writes is copied from its ring
//! 0 into B's ring 1 by one-sided writes; what B has consumed comes back as a position and is stored
//! as the other end's credits in A. All fabric objects belong to one thread with one completion
//! queue per device; there is one queue pair per other relay, whatever the number of connections.
//!
//! # A link
//!
//! ```text
//!  Joining ─ the other answered ─► Connecting ─ queue pairs ready ─► Up ─ error, silence ─► gone
//! ```
//!
//! Whoever has an end to offer dials where the host is configured; a called relay believes its
//! caller only after the relay at the configured address said that it made the call (`dial`). A
//! link that goes takes its connections with it: reset at both ends.
//!
//! # A connection
//!
//! ```text
//!  smaller address: Waiting ─ offer ─► Offered ─ accept ─► Paired (commit) ─┐
//!  larger address:  Waiting ─ offer came: accept ─► Promised ─ commit ─► Paired
//!                      │ 30 s, given up, refused                            │ closed was carried
//!                      ▼                                                    ▼
//!                 left to the kernel                     Ending ─ ended came ─► let go
//! ```
//!
//! The segment's state goes from open to promised (nobody gives up now), then paired. The last word
//! is the offering relay's, so that never one end alone leaves the kernel's stream for good: if it
//! says no, or its link breaks, the other end goes back to the kernel. The kernel's socket is held
//! from adoption until one of: the other end closed and its bytes are published; this end closed (or
//! nobody holds it any more) and the other relay said that it let go, or 10 s passed; the connection
//! was given up or reset.
//!
//! # Messages
//!
//! One message is one send of at most 4096 bytes with records of any number of connections
//! ([`message`] has the bytes). In one look at a connection:
//!
//! | what | limit | how |
//! | --- | --- | --- |
//! | a batch of at most 1024 bytes | a message | whole, in a data record |
//! | a larger batch | about 64 KiB a time, four times a look | one write (two at the ring's end) of all behind the first header; the header in a placed record behind it |
//! | messages under way | 8 a link, with data of one connection 4 | beyond: nothing is posted; the next completion takes everything since (p. 4.6) |
//! | writes under way | 64 a link | as above |
//! | records owed (answers, doorbells) | 16,384 a link | beyond: the link breaks |
//! | offers without their other end | 1,024 a link, 30 s | beyond: refused |
//!
//! # What is stored in which order
//!
//! | who | stores or does | then | then looks at or does | pairs with |
//! | --- | --- | --- | --- | --- |
//! | program A | payload, zero header behind it | header, release | fence; relay's arms, rings the bell if one is up | 1 |
//! | relay 1 | loads A's signs, acquire | loads headers, acquire, to the zero header | posts the write, then the message; signs that say an end go behind the last header seen | 1 |
//! | relay 2 | takes the message's completion: everything written before is placed (p. 4.6) | zero header behind the batch, then the first header, release | one full fence for all batches taken at once; B's arms: takes down what there is news of, says *ring* | 2 |
//! | program B | arms, heavy fence | looks at header, finished, closed | sleeps on the kernel's connection | 2 |
//! | relay 1 | told *ring* | has A's switch been carried? then B has stored it | one byte on the copy of A's socket | 3 |
//! | program B | reads the kernel's stream | loads `switched_at` afterwards | bytes beyond it are doorbells | 3 |
//! | program B | copies out | `consumed`, release | fence; relay's `send_armed`, rings the bell | 4 |
//! | relay 2 | loads `consumed`, acquire | *credit* | | 4 |
//! | relay 1 | credits, release | full fence; A's `send_armed` | *ring* | 5 |
//! | program A | arms `send_armed`, heavy fence | looks at credits | sleeps | 5 |
//! | relay | arms what it stops looking at | one heavy fence for all | looks again; news keeps it hot | 1, 4 |
//! | relay | nothing is hot: arms the completion queue | turns once more, then waits | | fabric's promise |
//!
//! The first header of a batch is the only word by which a program can come to see it, and it is
//! stored by a processor after the completion: whatever order a device places bytes in, nothing is
//! visible before all of it is there. The header behind a batch is zero before the batch is visible,
//! because it is stored first; a place is written again only after the program gave it back.
//!
//! An end that has not switched sends its bytes through the kernel, so no doorbell may be sent there
//! in its name. A sleeper at the other end that hears of room meanwhile keeps its arm, and the relay
//! says *nudge*: the other relay arms its own signs, so that the next call of its program switches.
//! The signs that come then are news, and the arm is looked at again.
//!
//! # Cost
//!
//! A message of a hot connection, each way: one look and one send posted at relay 1, one completion
//! and a copy at relay 2 (above 1024 bytes a write more and no copy), one completion at relay 1; one
//! message back for each half ring read. Several connections' records share a message. No system
//! call at either program. A program rings (three system calls) when its connection is cold: 200 us
//! without news. A look at a connection costs a few loads; cold ones are not looked at.
//!
//! # Trust
//!
//! Everything from another host and from a program is copied, checked, then used: positions,
//! lengths, headers, credits, signs that go back. Nonsense ends its connection with a reset on both
//! ends; a message that is none ends the link. A peer may write the incoming rings of connections
//! that it carries and nothing else: one protection domain per link, one region per ring (over
//! shared memory, where a region is a whole object, the whole segment).

mod attend;
mod carry;
mod connection;
mod dial;
pub mod guard;
mod holders;
mod link;
pub mod message;
mod mirror;
pub mod network;
mod protocol;
mod recall;
mod relay;
mod serve;
mod settings;
mod sleepy;

pub use connection::{Connection, Phase};
pub use relay::Core;
pub use serve::{Relay, RelayError};
pub use settings::{Counters, Host, Refusal, Settings};
