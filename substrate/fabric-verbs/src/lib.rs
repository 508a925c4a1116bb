//! Fabric provider over RDMA verbs: InfiniBand, RoCE, soft-RoCE.
//!
//! Place: `substrate`, beside the other providers, above `fabric` and `os`.
//!
//! ```text
//!  application's threads                              library's thread (one per device)
//!  post ─▶ queue pair ─▶ the device's send queue      asynchronous events of the device
//!  poll ◀─ completion queue ◀─ the device's           link ⇄ peers' devices: connect, gone
//! ```
//!
//! - `abi`, `library`, `handle`: libibverbs, loaded at run time: its binary interface, its
//!   functions, owners of its objects.
//! - [`discover`]: devices, ports, addresses, and which are used.
//! - `options`, `status`, `key`: times, codes and keys, pure.
//! - `endpoint`, `frame`: connection data, and what two devices say to each other, pure.
//! - `presence`: whether the kernel still offers the device.
//! - `shared`, `service`: what the library's thread shares with the application's, and the thread.
//! - `core`: what is outstanding on a queue pair, and what a completion means.
//! - `device`, `completion_queue`, `queue_pair`, `receive_queue`, `region`: fabric's objects.
//!
//! rdma-core is needed to use this provider, not to build it.

pub mod discover;

mod abi;
mod completion_queue;
mod core;
mod device;
mod endpoint;
mod frame;
mod handle;
mod key;
mod library;
mod options;
mod presence;
mod queue_pair;
mod receive_queue;
mod region;
mod service;
mod shared;
mod status;
mod wake;

pub use device::{VerbsDevice, VerbsError};
pub use endpoint::with_host;
pub use library::Missing;
pub use options::VerbsConfig;
