//! Changed tables, packs and chunks: refused or read, never a crash, never more memory than the input
//! is worth. Some seconds of it, the same in each run as far as time allows.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agentenv_blocks::chunk::{self, Entry};
use agentenv_blocks::layer::Layer;
use agentenv_blocks::stack::{Piece, Stack};
use agentenv_blocks::{pack, Id, BLOCK};

const TIME: Duration = Duration::from_secs(3);
/// A parsed table is some times its bytes; more in one piece is a length that nobody checked.
const WORTH: usize = 8;

struct Watched;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn note(size: usize) {
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(size)));
}

// SAFETY: everything is passed on to the system's allocator; `note` allocates nothing (the thread
// local is const and has no destructor).
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: as our caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as our caller promised; the pointer came from the same allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static WATCHED: Watched = Watched;

/// Runs `act` and says the largest piece of memory it took.
fn largest(act: impl FnOnce()) -> usize {
    LARGEST.set(0);
    act();
    LARGEST.get()
}

fn golden(name: &str) -> Vec<u8> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/layers");
    fs::read(root.join(name)).expect("a golden file")
}

struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let mixed = (self.0 >> 33) ^ self.0;
        mixed.wrapping_mul(0xff51_afd7_ed55_8ccd)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 16) as usize % end.max(1)
    }

    /// A number that somebody may have forgotten about.
    fn odd(&mut self) -> u64 {
        let edges = [
            0,
            1,
            7,
            31,
            32,
            255,
            256,
            257,
            4095,
            4096,
            (1 << 26) - 1,
            1 << 26,
            (1 << 26) + 1,
        ];
        match self.below(4) {
            0 => edges[self.below(edges.len())],
            1 => (1 << self.below(64)) - self.next() % 2,
            2 => u64::MAX - self.next() % 40,
            _ => self.next(),
        }
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..1 + self.below(4) {
            let at = self.below(bytes.len());
            match self.below(7) {
                0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                1 => bytes.truncate(at),
                2 => bytes.extend(std::iter::repeat_n(self.next() as u8, self.below(100))),
                3 => {
                    let part = bytes[at..(at + self.below(60)).min(bytes.len())].to_vec();
                    let to = self.below(bytes.len());
                    bytes.splice(to..to, part);
                }
                4 => drop(bytes.drain(at..(at + self.below(60)).min(bytes.len()))),
                _ => {
                    let width = [2, 4, 8][self.below(3)];
                    let number = self.odd().to_le_bytes();
                    // Fields are where numbers count; most are at even places.
                    let at = at & !1;
                    if let Some(field) = bytes.get_mut(at..at + width) {
                        field.copy_from_slice(&number[..width]);
                    }
                }
            }
        }
    }
}

/// Calls `act` with changed copies of a golden file while there is time.
fn changed(name: &str, seed: u64, mut act: impl FnMut(&mut Dice, Vec<u8>)) {
    let (whole, mut dice, begun) = (golden(name), Dice(seed), Instant::now());
    while begun.elapsed() < TIME {
        let mut bytes = whole.clone();
        dice.change(&mut bytes);
        act(&mut dice, bytes);
    }
}

fn use_layer(layer: Layer, dice: &mut Dice) {
    for number in 0..layer.chunk_count() {
        let (entry, begin) = (*layer.entry(number), layer.begin(number));
        assert_eq!(layer.chunk_at(begin), number);
        let count: u32 = layer
            .runs(begin, entry.blocks.into())
            .map(|(_, count)| count)
            .sum();
        assert_eq!(count, u32::from(entry.blocks));
        assert!(layer
            .place(number)
            .offset
            .checked_add(entry.stored.into())
            .is_some());
    }
    let (blocks, layer) = (layer.blocks(), Arc::new(layer));
    let at = dice.odd() as u32;
    let total = blocks.saturating_add(dice.odd() as u32 % 1000);
    if let Ok(stack) = Stack::new(total, vec![(Arc::clone(&layer), 0), (layer, at % 1000)]) {
        let first = dice.odd() as u32;
        let pieces: Vec<Piece> = stack.pieces(first, 1 << 20).collect();
        let count: u64 = pieces.iter().map(|piece| u64::from(piece.count())).sum();
        assert!(count <= 1 << 20);
    }
}

#[test]
fn changed_tables() {
    let mut read = 0;
    changed("table", 1, |dice, mut bytes| {
        if dice.below(4) > 0 {
            // Sealed anew: the checks behind the checksum are reached.
            bytes.truncate(bytes.len().saturating_sub(32));
            let digest = Id::of(&bytes);
            bytes.extend_from_slice(&digest.0);
        }
        let mut found = None;
        let most = largest(|| found = Layer::decode(&bytes).ok());
        assert!(
            most <= WORTH * bytes.len() + 4096,
            "{most} for {}",
            bytes.len()
        );
        if let Some(layer) = found {
            read += 1;
            assert_eq!(layer.encode().len(), bytes.len());
            use_layer(layer, dice);
        }
    });
    assert!(
        read > 0,
        "none was read: nothing behind the checks was tried"
    );
}

#[test]
fn changed_packs() {
    changed("pack", 2, |dice, bytes| {
        let at = bytes.len().saturating_sub(pack::FOOTER);
        let mut footer = bytes[at..].to_vec();
        let range = pack::directory_range(bytes.len() as u64, &footer);
        let (from, to) = match range {
            Ok((at, length)) => (at as usize, (at + length) as usize),
            Err(_) => (dice.below(bytes.len()), bytes.len()),
        };
        let part = bytes.get(from..to).expect("inside the pack, or refused");
        if footer.len() == pack::FOOTER {
            footer[16..].copy_from_slice(&Id::of(part).0);
        }
        let mut found = None;
        let most = largest(|| found = pack::directory(&footer, part).ok());
        assert!(
            most <= WORTH * part.len() + 4096,
            "{most} for {}",
            part.len()
        );
        for (entry, at) in found.unwrap_or_default() {
            assert!(at.checked_add(entry.stored.into()).is_some());
            assert!(entry.bytes() <= usize::from(chunk::MAX_BLOCKS) * BLOCK);
        }
    });
}

#[test]
fn changed_chunks() {
    let (layer, pack) = (Layer::decode(&golden("table")).expect("it"), golden("pack"));
    let (mut dice, begun) = (Dice(3), Instant::now());
    while begun.elapsed() < TIME {
        let number = dice.below(layer.chunk_count() as usize) as u32;
        let (entry, at) = (*layer.entry(number), layer.place(number).offset as usize);
        let mut stored = pack[at..][..entry.stored as usize].to_vec();
        let whole = stored.clone();
        dice.change(&mut stored);
        let codec = dice.below(3) as u16;
        let said = if dice.below(2) == 0 {
            entry.stored
        } else {
            stored.len() as u32
        };
        let blocks = if dice.below(2) == 0 {
            entry.blocks
        } else {
            dice.odd() as u16
        };
        let Ok(said) = Entry::new(entry.id, said, blocks, codec) else {
            continue;
        };
        let mut out = vec![0; said.bytes()];
        if chunk::decode(&said, &stored, &mut out).is_ok() {
            // Whatever was changed, the content is the right one.
            assert!(
                Id::of(&out) == entry.id && (stored == whole || said.codec != chunk::Codec::Plain)
            );
        }
    }
}
