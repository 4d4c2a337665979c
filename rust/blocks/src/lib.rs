//! Block layers: immutable, sparse, chunked, compressed, named by their content.
//!
//! In the order in which bytes meet them (the formats are drawn in `docs/FORMATS.md`):

mod bytes; // reading fields of untrusted bytes
pub mod chunk; // one chunk: name, compression, verification
pub mod cut; // where a chunk ends
mod id; // names
pub mod layer; // the table of a layer: what is where
pub mod pack; // chunks in one object
pub mod stack; // ordered layers as one flat file
pub mod write; // from blocks to a layer and a pack

pub use bytes::Damaged;
pub use id::Id;

/// Bytes of a block, the unit of everything: a page, and what file systems write.
pub const BLOCK: usize = 4096;
