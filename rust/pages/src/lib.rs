//! The memory of another process: which pages it changed, and their bytes.
//!
//! - `scan`  pages that a private mapping does not share with its file any more
//! - `file`  pages that a memory file has
//! - `save`  copied out, zeroes told apart, written as a sparse file
//!
//! Positions are in pages from the beginning of the memory, sizes in pages unless named bytes.

mod file;
mod remote;
mod room;
mod save;
mod scan;

pub use file::allocated;
pub use save::{copy, write_through, Held, Written};
pub use scan::changed;

pub const PAGE: usize = 4096;

/// Consecutive pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub first: u32,
    pub count: u32,
}

/// Where the memory lies: a process and the address of its first page.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    pub pid: libc::pid_t,
    pub at: u64,
    pub pages: u32,
}

impl Memory {
    fn address(&self, page: u32) -> u64 {
        self.at + u64::from(page) * PAGE as u64
    }

    fn page(&self, address: u64) -> u32 {
        ((address - self.at) / PAGE as u64) as u32
    }
}

/// Appends pages to runs in order, joining what touches.
fn extend(runs: &mut Vec<Run>, first: u32, count: u32) {
    match runs.last_mut() {
        Some(last) if last.first + last.count == first => last.count += count,
        _ => runs.push(Run { first, count }),
    }
}
