use super::*;
use agentenv_blocks::chunk::{self, Entry};
use agentenv_blocks::layer::{Layer, Place};
use std::collections::HashMap;

use crate::cache::file::buffer;
use crate::flight::Plain;

/// Numbers that look random and are the same each time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as u32 % end
    }
}

struct Made {
    stack: OpenStack,
    flat: Vec<u8>,
    plains: HashMap<(usize, u32), Plain>,
    _folder: tempfile::TempDir,
}

const BLOCKS: u32 = 120;

/// Layers of random extents cut into chunks of random lengths, over one another.
fn made(seed: u64) -> Made {
    let mut dice = Dice(seed);
    let folder = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let (mut flat, mut plains) = (vec![0; BLOCKS as usize * BLOCK], HashMap::new());
    let (mut files, mut parts) = (Vec::new(), Vec::new());
    for number in 0..4 {
        let (mut extents, mut at, mut data) = (Vec::new(), dice.below(10), Vec::new());
        let base = dice.below(20);
        while at < 90 {
            let (count, zero) = (1 + dice.below(9), dice.below(4) == 0);
            for block in at..at + count {
                let mut bytes = [0; BLOCK];
                if !zero {
                    bytes.fill(1 + number as u8);
                    bytes[..8].copy_from_slice(&(seed ^ u64::from(block)).to_le_bytes());
                    data.extend_from_slice(&bytes);
                }
                flat[(base + block) as usize * BLOCK..][..BLOCK].copy_from_slice(&bytes);
            }
            extents.push((at, count, zero));
            at += count + dice.below(9);
        }
        let (mut chunks, mut rest): (Vec<(Entry, Place)>, _) = (Vec::new(), &data[..]);
        while !rest.is_empty() {
            let length = (1 + dice.below(7) as usize) * BLOCK;
            let (part, more) = rest.split_at(length.min(rest.len()));
            let mut plain = buffer(part.len());
            plain.copy_from_slice(part);
            let place = Place {
                pack: Id([0; 32]),
                offset: 0,
            };
            plains.insert((number, chunks.len() as u32), Arc::new(plain));
            chunks.push((chunk::encode(Id::of(part), part).0, place));
            rest = more;
        }
        let layer = Arc::new(Layer::new(100, extents, &chunks).expect("a layer"));
        let path = folder.path().join(format!("{number}.data"));
        files.push(Arc::new(
            LayerFile::open(path, Arc::clone(&layer)).expect("a file"),
        ));
        parts.push((layer, base));
    }
    let stack = Stack::new(BLOCKS, parts).expect("a stack");
    let changes = Arc::new(watch::channel(0).0);
    let stack = OpenStack::new(Id([0; 32]), 2, Kind::Disk, stack, files, changes);
    Made {
        stack,
        flat,
        plains,
        _folder: folder,
    }
}

#[test]
fn what_is_here_and_what_arrived_make_the_flat_file() {
    for seed in 1..12 {
        let Made {
            stack,
            flat,
            plains,
            _folder,
        } = made(seed);
        let mut dice = Dice(seed * 77);
        for ((layer, chunk), plain) in &plains {
            if dice.below(2) == 0 {
                stack.files[*layer].store(*chunk, plain).expect("room");
            }
        }
        for _ in 0..60 {
            let first = dice.below(BLOCKS);
            let count = 1 + dice.below(BLOCKS - first + 3); // and beyond the end
            let mut wanted = flat[first as usize * BLOCK..].to_vec();
            wanted.resize(count as usize * BLOCK, 0);
            wanted.truncate(count as usize * BLOCK);
            let mut out = buffer(count as usize * BLOCK);
            out.fill(0xee);
            let missing = stack.missing(first, count);
            assert!(missing.windows(2).all(|pair| pair[0] < pair[1]));
            assert_eq!(stack.read_now(first, &mut out), missing.is_empty());
            if let Some(last) = missing.last() {
                let lacks = |layer, chunk| {
                    let found = missing.contains(&(layer, chunk)) && (layer, chunk) != *last;
                    found.then(|| &plains[&(layer, chunk)][..])
                };
                assert!(!stack.assemble(first, &mut out, lacks));
            }
            let arrived = |layer, chunk| {
                let found = missing.contains(&(layer, chunk));
                found.then(|| &plains[&(layer, chunk)][..])
            };
            assert!(stack.assemble(first, &mut out, arrived));
            assert!(out[..] == wanted[..], "seed {seed}: {count} from {first}");
        }
    }
}

#[test]
fn first_use_is_in_order_and_ends() {
    let Made { stack, plains, .. } = made(5);
    for ((layer, chunk), plain) in &plains {
        stack.files[*layer].store(*chunk, plain).expect("room");
    }
    let used = stack.missing(50, 10);
    assert!(used.is_empty());
    stack.missing(0, 10);
    stack.missing(50, 10);
    let found = stack.first_use();
    let unique: HashSet<_> = found.iter().collect();
    assert!(!found.is_empty() && unique.len() == found.len());
    stack.missing(0, BLOCKS);
    assert!(stack.first_use().is_empty());
}

#[test]
fn who_reads_on_gets_more_and_more_ahead() {
    let chunks = |made: &Made| made.stack.files[0].layer().chunk_count();
    let large = (1..99).map(made).find(|made| chunks(made) > 9);
    let Made { stack, .. } = large.expect("a large one");
    let count = stack.files[0].layer().chunk_count();
    assert_eq!(stack.ahead(0, 0, 0), 1..1);
    assert_eq!(stack.ahead(0, 1, 1), 2..4);
    assert_eq!(stack.ahead(0, 2, 2), 4..7.min(count)); // behind what is on its way
    assert!(stack.ahead(0, 3, 3).is_empty()); // enough is
    assert_eq!(stack.ahead(0, 7, 7), 8..count.min(16));
    assert_eq!(stack.ahead(0, 1, 1), 2..2); // elsewhere
    assert_eq!(stack.ahead(0, count - 1, count - 1), count..count);
}

#[test]
fn faults_come_and_go() {
    let stack = Arc::new(made(1).stack);
    let cause = |text: &str| -> Arc<str> { text.into() };
    let told = |stack: &OpenStack| stack.fault.lock().clone().map(|f| (f.cause, f.failed));
    let (one, two) = (stack.wait(), stack.wait());
    stack.set_fault(&cause("slow"), false);
    stack.set_fault(&cause("slower"), false);
    assert_eq!(told(&stack), Some((cause("slow"), false)));
    drop(one);
    assert!(told(&stack).is_some()); // another one waits
    drop(two);
    assert_eq!(told(&stack), None);
    let wait = stack.wait();
    stack.set_fault(&cause("slow"), false);
    stack.set_fault(&cause("gone"), true);
    drop(wait);
    assert_eq!(told(&stack), Some((cause("gone"), true)));
    stack.clear_fault(true);
    assert_eq!(told(&stack), None);
    assert_eq!(*stack.changes.borrow(), 5);
}
