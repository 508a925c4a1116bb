//! One-sided key-value client: BOOM and its two baselines.
//!
//! Place: `engines`, beside `kv-server`; sees fabric traits and never a provider. An application
//! supplies a [`Connector`]; everything else is here.
//!
//! ```text
//! Client ── Link (one per shard) ── QueuePair     a key goes straight to its shard: zero hops
//!             ├ slots: staging + result memory, one per request outstanding
//!             ├ grant: the log segment this client writes, and where its tail is
//!             └ UpdateTable: which slots may be overwritten in place (BOOM §3.3)
//! ```
//!
//! A put is one `WRITE_WITH_IMM` into the granted segment and one small reply; a get is one `SEND`
//! and one `WRITE_WITH_IMM` by the server into the client's result memory. Entries carry a
//! checksum; what arrives is copied, checked, then shown.
//!
//! A [`Client`] stays on one thread, so nothing is locked. Several threads make one each.
//!
//! ```no_run
//! use beeline_kv_client::{Client, ClientError, ClientOptions, Connector, PutOptions};
//! fn greet(connector: Box<dyn Connector>) -> Result<(), ClientError> {
//!     let mut client = Client::connect(connector, ClientOptions::default())?;
//!     client.put(0, b"key", b"value", PutOptions::default())?;
//!     assert_eq!(client.get(0, b"key")?.as_deref(), Some(&b"value"[..]));
//!     Ok(())
//! }
//! ```

#![forbid(unsafe_code)]

pub mod client;
pub mod connector;
pub mod counters;
pub mod error;
mod link;
pub mod options;
mod slot;
mod sync;
pub mod update;

pub use client::{Answer, Client, Command, Token};
pub use connector::{ConnectError, Connector};
pub use counters::ClientCounters;
pub use error::ClientError;
pub use options::{ClientOptions, Conditions, PutOptions};
pub use sync::{ScanPage, ValueInfo};
pub use update::{SpaceUse, UpdateTable, measure_space};
