//! Network functions at run time.
//!
//! Place: `systems`, above the compiler. [`load`] reads a source file with its imports;
//! [`pcap`] reads and writes captures; [`engine`] runs a graph from captures to captures, [`live`]
//! between network interfaces, with signals, [`wire`] its simulated hardware there. [`functions`] holds the host's side of whole functions:
//! the firewall's rules, the balancer's backends. [`diff`] compares the back ends; [`report`] says what
//! the compiler decided, [`area`] what it takes of a chip; [`debug`] steps through a graph. [`sides`] runs
//! a graph's `host` elements on a thread of their own, behind the link of [`pcie`], and others on more
//! threads. [`packet_socket`] and [`pcie::bus`] hold the unsafe code.

pub mod area;
pub mod build;
pub mod completion;
pub mod debug;
pub mod diff;
pub mod engine;
pub mod functions;
pub mod hand_written;
pub mod live;
pub mod load;
pub mod packet_socket;
pub mod pcap;
pub mod pcie;
pub mod reload;
pub mod report;
pub mod sides;
pub mod statistics;
pub mod timing;
pub mod wire;
