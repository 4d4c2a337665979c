//! Where a chunk ends. Ends are always between blocks.
//!
//! `Content`: behind a block whose own bytes say so, so that equal runs of blocks are cut alike
//! wherever they stand; independently built images then share most chunks of equal files (70-77 %
//! of the bytes against almost none with fixed lengths: DESIGN.md, measured). `Fixed`: at the same
//! offsets in every layer, which finds what did not change in memory and disks.

use xxhash_rust::xxh3::xxh3_64;

use crate::chunk::MAX_BLOCKS;

/// Blocks of a content-defined chunk: 32 KiB to 256 KiB, 128 KiB on average.
const LEAST: u32 = 8;
const MOST: u32 = 64;
/// One block in so many ends a chunk that is long enough.
const ONE_IN: u64 = 24;

/// How a layer is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    Content,
    /// Into windows of so many blocks (1 to `MAX_BLOCKS`), counted from logical block 0.
    Fixed(u16),
}

/// Follows one layer's data blocks in order.
pub(crate) struct Cutter {
    cut: Cut,
    held: u32,
    next: Option<u32>,
}

impl Cutter {
    pub fn new(cut: Cut) -> Self {
        let (held, next) = (0, None);
        Self { cut, held, next }
    }

    /// Whether a chunk must end before this logical block.
    pub fn ends_before(&self, logical: u32) -> bool {
        let Cut::Fixed(window) = self.cut else {
            return false;
        };
        let window = u32::from(window.clamp(1, MAX_BLOCKS));
        self.held > 0
            && self
                .next
                .is_none_or(|next| (next - 1) / window != logical / window)
    }

    /// Takes a block; whether the chunk ends behind it.
    pub fn ends_behind(&mut self, logical: u32, block: &[u8]) -> bool {
        self.held += 1;
        self.next = logical.checked_add(1);
        match self.cut {
            Cut::Content => {
                self.held >= MOST || (self.held >= LEAST && xxh3_64(block) < u64::MAX / ONE_IN)
            }
            Cut::Fixed(window) => self.held >= u32::from(window.clamp(1, MAX_BLOCKS)),
        }
    }

    pub fn begin(&mut self) {
        self.held = 0;
    }
}
