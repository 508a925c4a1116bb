//! User-space stream sockets: what the preload library does, as a library.
//!
//! A connection begins as an ordinary kernel TCP connection. When both ends turn out to run this
//! library on one host, each direction moves to a ring in shared memory; the kernel connection
//! stays, as the descriptor that the program sees, as the notice of the other end's death, and as
//! the doorbell that wakes a sleeper. Whatever is not understood here is left to the kernel.
//!
//! Place: `systems`. `sockets-preload` exports the C functions that call in here,
//! `sockets-monitor` introduces the two ends to each other. `docs/sockets-internals.md` has the design.
//!
//! - [`lane`]: what carries a connection, the rings of this crate's other modules or [`packets`].
//! - [`ring`], [`segment`]: the shared memory; [`bare`]: it alone.
//! - [`control`], [`introduce`]: asking the monitor.
//! - [`relayed`]: names, records and the bell of connections to other hosts.
//! - [`connection`], [`holder`], [`receive`], [`send`]: one accelerated connection; [`between`]: to another host.
//! - [`recall`]: its way back to the kernel; [`anew`]: and out again.
//! - [`ending`]: `close` and `shutdown`; [`together`]: which processes have an end.
//! - [`table`]: which descriptor is which connection; [`young`]: which has not shown that it lives.
//! - [`epoll`], [`poll`]: readiness of mixed descriptors.
//! - [`carrier`]: a connection for a program that has no library; [`receiver`]: who has none;
//!   [`report`]: whether a program began.
//! - [`wait`], [`wake`], [`board`], `bells`: spinning, and the sleeper's side and the waker's.
//! - [`kernel`]: system calls that do not pass through the names we export.
//!
//! Nothing here may panic into the program it lives in, print, or call a function by a name that
//! the preload library exports.

pub mod anew;
pub mod bare;
mod bells;
pub mod between;
pub mod board;
pub mod carrier;
pub mod connection;
pub mod control;
pub mod ending;
pub mod epoll;
pub mod holder;
pub mod introduce;
pub mod kernel;
pub mod lane;
pub mod packets;
pub mod poll;
pub mod recall;
pub mod receive;
pub mod receiver;
pub mod relayed;
pub mod report;
mod retired;
pub mod ring;
pub mod segment;
pub mod send;
mod settled;
pub mod sleepers;
pub mod table;
pub mod together;
pub mod wait;
pub mod wake;
pub mod young;

pub use kernel::Errno;
