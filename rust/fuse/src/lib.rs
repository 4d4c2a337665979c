//! The kernel's FUSE protocol for one kind of file system: a flat, read-only folder of immutable
//! files, served over a `/dev/fuse` descriptor that somebody else opened, mounted and keeps open.
//!
//! - [`Files`]: what a server implements; [`ReadReply`]: a read's answer, given by any thread, later.
//! - [`Connection`]: serves the descriptor with several threads, sends notifications, registers
//!   backing files. Its descriptor outlives the server: a new server adopts the live connection
//!   ([`Start::Adopted`]) and gets the requests in flight delivered again.
//!
//! Inside: `protocol` (numbers and layouts), `answer` (request to reply, pure), `interrupt` (which
//! reads wait, and whose reader is being killed), `serve` (the worker threads).

mod answer;
mod connection;
mod files;
mod interrupt;
mod protocol;
mod reply;
mod serve;

pub use connection::{Connection, Negotiated};
pub use files::{Attr, Files, Opened};
pub use reply::ReadReply;
pub use rustix::io::Errno;
pub use serve::Start;
