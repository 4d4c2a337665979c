//! Ordered layers as one flat file.
//!
//! A stack lays layers over one another, each from a block of its own on; where several hold a
//! block, the last one counts; where none does, it reads as zeroes. Images lay their parts side by
//! side, disks and memory lay changes over a base.

use std::sync::Arc;

use crate::layer::Layer;
use crate::{Damaged, Id};

const ID_CONTEXT: &str = "agentenv 2026-12 block stack 1";
/// More are refused; long chains are compacted long before.
pub const MAX_LAYERS: usize = 4096;

/// Blocks of the flat file that come from one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: u32,
    count: u32,
    /// First block in the layer.
    block: u32,
    /// Its place in the layer's data.
    data: u32,
    layer: u16,
    zero: bool,
}

/// What a range of the flat file consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    Zeroes {
        count: u32,
    },
    /// `block` is the layer's own, `data` its place in the layer's data; `layer` is its number in
    /// the stack.
    Data {
        layer: usize,
        block: u32,
        data: u32,
        count: u32,
    },
}

impl Piece {
    pub fn count(&self) -> u32 {
        match self {
            Piece::Zeroes { count } | Piece::Data { count, .. } => *count,
        }
    }
}

/// The name of a stack: of its length and its layers with their first blocks, bottom first.
pub fn id(blocks: u32, layers: &[(Id, u32)]) -> Id {
    let mut hasher = blake3::Hasher::new_derive_key(ID_CONTEXT);
    hasher.update(&blocks.to_le_bytes());
    for (id, at) in layers {
        hasher.update(&id.0);
        hasher.update(&at.to_le_bytes());
    }
    Id(*hasher.finalize().as_bytes())
}

/// Layers with their merged index.
#[derive(Debug)]
pub struct Stack {
    blocks: u32,
    layers: Vec<Arc<Layer>>,
    runs: Vec<Run>,
}

impl Stack {
    /// Refuses more layers than `MAX_LAYERS` and one that ends behind the stack's end.
    pub fn new(blocks: u32, layers: Vec<(Arc<Layer>, u32)>) -> Result<Self, Damaged> {
        if layers.len() > MAX_LAYERS {
            return Err(Damaged("a stack has too many layers"));
        }
        let mut runs = Vec::new();
        for (number, (layer, at)) in layers.iter().enumerate() {
            if at
                .checked_add(layer.blocks())
                .is_none_or(|end| end > blocks)
            {
                return Err(Damaged("a layer ends behind the end of its stack"));
            }
            let upper = layer.extents().iter().map(|extent| Run {
                first: at + extent.first,
                count: extent.count,
                block: extent.first,
                data: extent.data,
                layer: number as u16,
                zero: extent.zero,
            });
            runs = if runs.is_empty() {
                upper.collect()
            } else {
                lay_over(&runs, upper)
            };
        }
        runs.shrink_to_fit();
        let layers = layers.into_iter().map(|(layer, _)| layer).collect();
        Ok(Self {
            blocks,
            layers,
            runs,
        })
    }

    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.layers
    }

    /// What `count` blocks from `first` on consist of, without what lies behind the end.
    pub fn pieces(&self, first: u32, count: u32) -> Pieces<'_> {
        let end = first.saturating_add(count).min(self.blocks);
        let from = self
            .runs
            .partition_point(|run| run.first + run.count <= first);
        Pieces {
            runs: &self.runs[from..],
            at: first,
            end,
        }
    }
}

/// Blocks of layers laid over one another that come from one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Top {
    pub first: u32,
    pub count: u32,
    pub zero: bool,
    /// The layer's number, the lowest is 0.
    pub layer: usize,
}

/// What is on top where layers that hold these runs (first block, count, zeroes), each in order,
/// begin at one block. Refuses more layers than `MAX_LAYERS`.
pub fn tops(layers: &[Vec<(u32, u32, bool)>]) -> Result<Vec<Top>, Damaged> {
    if layers.len() > MAX_LAYERS {
        return Err(Damaged("a stack has too many layers"));
    }
    let mut runs = Vec::new();
    for (number, layer) in layers.iter().enumerate() {
        let upper = layer.iter().map(|&(first, count, zero)| Run {
            first,
            count,
            block: first,
            data: 0,
            layer: number as u16,
            zero,
        });
        runs = lay_over(&runs, upper);
    }
    let top = |run: Run| Top {
        first: run.first,
        count: run.count,
        zero: run.zero,
        layer: run.layer.into(),
    };
    Ok(runs.into_iter().map(top).collect())
}

/// Iterates over the pieces of a range.
pub struct Pieces<'a> {
    runs: &'a [Run],
    at: u32,
    end: u32,
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.at >= self.end {
            return None;
        }
        let Some((run, rest)) = self
            .runs
            .split_first()
            .filter(|(run, _)| run.first < self.end)
        else {
            let count = self.end - self.at;
            self.at = self.end;
            return Some(Piece::Zeroes { count });
        };
        if run.first > self.at {
            let count = run.first - self.at;
            self.at = run.first;
            return Some(Piece::Zeroes { count });
        }
        let skip = self.at - run.first;
        let count = (run.count - skip).min(self.end - self.at);
        self.at += count;
        self.runs = rest;
        Some(if run.zero {
            Piece::Zeroes { count }
        } else {
            Piece::Data {
                layer: run.layer.into(),
                block: run.block + skip,
                data: run.data + skip,
                count,
            }
        })
    }
}

/// Both in order; where they overlap, what is left of the lower ones around the upper ones.
fn lay_over(lower: &[Run], upper: impl Iterator<Item = Run>) -> Vec<Run> {
    let mut out = Vec::with_capacity(lower.len() + upper.size_hint().0);
    let mut below = lower.iter().copied();
    let mut rest = below.next();
    for over in upper {
        let end = over.first + over.count;
        while let Some(run) = rest {
            let run_end = run.first + run.count;
            if run_end <= over.first {
                out.push(run);
                rest = below.next();
                continue;
            }
            if run.first < over.first {
                out.push(Run {
                    count: over.first - run.first,
                    ..run
                });
            }
            if run_end > end {
                rest = Some(behind(run, end.max(run.first)));
                break;
            }
            rest = below.next();
        }
        out.push(over);
    }
    out.extend(rest);
    out.extend(below);
    out
}

/// What is left of a run from a block on.
fn behind(run: Run, at: u32) -> Run {
    let skip = at - run.first;
    Run {
        first: at,
        count: run.count - skip,
        block: run.block + skip,
        data: if run.zero { run.data } else { run.data + skip },
        ..run
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::Entry;
    use crate::layer::Place;
    use proptest::prelude::*;

    fn layer(blocks: u32, extents: &[(u32, u32, bool)]) -> Arc<Layer> {
        let data: u32 = extents.iter().filter(|e| !e.2).map(|e| e.1).sum();
        let place = Place {
            pack: Id([0; 32]),
            offset: 0,
        };
        let one = Entry::new(Id([1; 32]), 4096, 1, 0).unwrap();
        let chunks = vec![(one, place); data as usize];
        Arc::new(Layer::new(blocks, extents.to_vec(), &chunks).unwrap())
    }

    /// What each block is, the slow way: (layer, block), None for zeroes.
    fn naive(blocks: u32, layers: &[(Arc<Layer>, u32)]) -> Vec<Option<(usize, u32)>> {
        let mut flat = vec![None; blocks as usize];
        for (number, (layer, at)) in layers.iter().enumerate() {
            for extent in layer.extents() {
                for block in extent.first..extent.first + extent.count {
                    flat[(at + block) as usize] = (!extent.zero).then_some((number, block));
                }
            }
        }
        flat
    }

    fn flat(stack: &Stack, first: u32, count: u32) -> Vec<Option<(usize, u32)>> {
        let mut out = Vec::new();
        for piece in stack.pieces(first, count) {
            match piece {
                Piece::Zeroes { count } => out.extend((0..count).map(|_| None)),
                Piece::Data {
                    layer,
                    block,
                    data,
                    count,
                } => {
                    let runs: Vec<_> = stack.layers()[layer].runs(data, count).collect();
                    assert_eq!(runs, [(block, count)]);
                    out.extend((block..block + count).map(|block| Some((layer, block))));
                }
            }
        }
        out
    }

    prop_compose! {
        fn extents()(steps in proptest::collection::vec((0u32..5, 1u32..6, any::<bool>()), 0..8))
            -> Vec<(u32, u32, bool)> {
            let mut at = 0;
            steps.into_iter().map(|(gap, count, zero)| {
                let first = at + gap;
                at = first + count;
                (first, count, zero)
            }).collect()
        }
    }

    proptest! {
        #[test]
        fn it_is_what_laying_block_by_block_gives(
            tables in proptest::collection::vec((extents(), 0u32..20), 0..6),
            first in 0u32..120, count in 0u32..120,
        ) {
            let layers: Vec<_> = tables.iter().map(|(e, at)| (layer(88, e), *at)).collect();
            let wanted = naive(110, &layers);
            let stack = Stack::new(110, layers).unwrap();
            prop_assert_eq!(flat(&stack, 0, 110), wanted.clone());
            let end = (first + count).min(110).max(first.min(110)) as usize;
            let part = wanted[(first as usize).min(110)..end].to_vec();
            prop_assert_eq!(flat(&stack, first, count), part);
        }
    }

    #[test]
    fn upper_runs_hide_lower_ones() {
        let low = vec![(0, 10, false), (20, 5, false)];
        let high = vec![(3, 2, true), (8, 14, false)];
        let tops = tops(&[low, high]).unwrap();
        let found: Vec<_> = tops
            .iter()
            .map(|t| (t.first, t.count, t.zero, t.layer))
            .collect();
        let wanted = [
            (0, 3, false, 0),
            (3, 2, true, 1),
            (5, 3, false, 0),
            (8, 14, false, 1),
            (22, 3, false, 0),
        ];
        assert_eq!(found, wanted);
    }

    #[test]
    fn a_layer_beyond_the_end_is_refused() {
        assert!(Stack::new(10, vec![(layer(8, &[]), 3)]).is_err());
        assert!(Stack::new(10, vec![(layer(8, &[]), u32::MAX)]).is_err());
    }

    #[test]
    fn a_name_tells_order_place_and_length() {
        let (a, b) = (Id([1; 32]), Id([2; 32]));
        let names = [
            id(9, &[(a, 0), (b, 0)]),
            id(9, &[(b, 0), (a, 0)]),
            id(9, &[(a, 0), (b, 1)]),
            id(8, &[(a, 0), (b, 0)]),
        ];
        let unique: std::collections::HashSet<_> = names.iter().collect();
        assert_eq!(unique.len(), 4);
    }
}
