//! From URL or negotiation to a fabric provider.
//!
//! Place: `substrate`, above the providers; used at the edge of a program only.
//!
//! ```text
//!  client                                       server
//!  Dialler::dial ── negotiate: host, providers ──▶ Bootstrap ── chooses, says why
//!  queue pair made on the chosen device
//!  Dialled::exchange ── join: connect data, hello ──▶ Incoming ─▶ the shard's thread makes its
//!        ◀───────────── connect data, answer ──────── Reply ◀──── queue pair, connects passive
//!  connect active
//! ```
//!
//! - [`open`]: a device by URL; [`open_window`]: one over a memory window, to be served.
//! - [`Bootstrap`]: the service; [`Dialler`]: the client. [`message`] has the bytes and the choice.
//!
//! Invariants: the choice and its reason are visible to both programs ([`Reason`]); a provider
//! that fails is replaced by the next best on the next attempt ([`Dialler::avoid`]); reconnecting is
//! connecting again; a caller of the bootstrap service can hold up nobody but itself.

#![forbid(unsafe_code)]

mod bootstrap;
mod dialler;
mod error;
mod host;
pub mod message;
mod providers;
mod url;
mod window;

/// Which memory windows this host has.
pub use beeline_fabric_ntb::Side;
pub use beeline_fabric_ntb::detect as windows;
/// Which RDMA devices this host has.
pub use beeline_fabric_verbs::discover as rdma;
pub use bootstrap::{Bootstrap, BootstrapConfig, Incoming, Reply, Service};
pub use dialler::{Dialled, Dialler, Established};
pub use error::OpenError;
pub use host::HostIdentity;
pub use message::Reason;
pub use providers::{PROVIDERS, open};
pub use url::{BootstrapAddress, DEFAULT_PORT, ServiceUrl, WindowFile};
pub use window::{ServedWindow, WindowEnd, open_window};
