//! Pages copied out of a process: held in memory so that its guest may go on at once, or written as
//! they are read. The file is sparse and flat, each page at its own place; zero pages are named, not
//! written.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rayon::prelude::*;

use crate::room::Room;
use crate::{extend, remote, Memory, Run, PAGE};

/// Pages of one piece of work: large enough to hide its start, small enough to share out.
const PIECE: u32 = 256;

/// What a file got: runs with data, and runs of zeroes that hide what lies below.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    pub runs: Vec<(u32, u32, bool)>,
    pub data_pages: u32,
}

impl Written {
    fn extend(&mut self, first: u32, count: u32, zero: bool) {
        match self.runs.last_mut() {
            Some((begin, length, was)) if *was == zero && *begin + *length == first => {
                *length += count
            }
            _ => self.runs.push((first, count, zero)),
        }
        self.data_pages += if zero { 0 } else { count };
    }
}

/// Pages in our memory, one after another.
pub struct Held {
    pieces: Vec<(Run, usize)>,
    bytes: Room,
}

/// Copies `runs` out; the process may go on when this returns.
pub fn copy(memory: Memory, runs: &[Run]) -> io::Result<Held> {
    let mut at = 0;
    let pieces: Vec<(Run, usize)> = split(runs)
        .into_iter()
        .map(|run| {
            let begin = at;
            at += run.count as usize * PAGE;
            (run, begin)
        })
        .collect();
    let mut bytes = Room::new(at)?;
    let mut rest = bytes.all();
    let mut places = Vec::with_capacity(pieces.len());
    for (run, _) in &pieces {
        let (place, more) = rest.split_at_mut(run.count as usize * PAGE);
        places.push((*run, place));
        rest = more;
    }
    let read = |(run, place): (Run, &mut [u8])| remote::read(memory, run, place);
    places
        .into_par_iter()
        .map(read)
        .collect::<io::Result<()>>()?;
    Ok(Held { pieces, bytes })
}

impl Held {
    /// Writes what is held to `file`.
    pub fn write(&self, file: &File) -> io::Result<Written> {
        let parts: io::Result<Vec<_>> = self
            .pieces
            .par_iter()
            .map(|(run, at)| put(file, *run, self.bytes.get(*at, run.count as usize * PAGE)))
            .collect();
        Ok(joined(parts?))
    }
}

/// As `copy` and `Held::write` in one, with little memory: for a process that does not go on.
pub fn write_through(memory: Memory, runs: &[Run], file: &File) -> io::Result<Written> {
    let parts: io::Result<Vec<_>> = split(runs)
        .into_par_iter()
        .map(|run| put(file, run, &read(memory, run)?))
        .collect();
    Ok(joined(parts?))
}

fn read(memory: Memory, run: Run) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; run.count as usize * PAGE];
    remote::read(memory, run, &mut bytes)?;
    Ok(bytes)
}

fn split(runs: &[Run]) -> Vec<Run> {
    let mut pieces = Vec::new();
    for run in runs {
        for first in (run.first..run.first + run.count).step_by(PIECE as usize) {
            let count = PIECE.min(run.first + run.count - first);
            pieces.push(Run { first, count });
        }
    }
    pieces
}

/// Writes the pages of one piece that are no zeroes.
fn put(file: &File, run: Run, bytes: &[u8]) -> io::Result<Written> {
    let mut written = Written::default();
    let mut data: Vec<Run> = Vec::new();
    for (number, page) in bytes.chunks_exact(PAGE).enumerate() {
        let at = run.first + number as u32;
        let zero = is_zero(page);
        written.extend(at, 1, zero);
        if !zero {
            extend(&mut data, at, 1);
        }
    }
    for part in data {
        let from = (part.first - run.first) as usize * PAGE;
        let bytes = &bytes[from..from + part.count as usize * PAGE];
        file.write_all_at(bytes, u64::from(part.first) * PAGE as u64)?;
    }
    Ok(written)
}

fn is_zero(page: &[u8]) -> bool {
    // SAFETY: any bytes are valid u128s; `align_to` gives the aligned middle.
    let (head, middle, tail) = unsafe { page.align_to::<u128>() };
    head.iter().chain(tail).all(|byte| *byte == 0) && middle.iter().all(|word| *word == 0)
}

fn joined(parts: Vec<Written>) -> Written {
    let mut all = Written::default();
    for part in parts {
        for (first, count, zero) in part.runs {
            all.extend(first, count, zero);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// This process's own memory as another's.
    fn memory(bytes: &[u8]) -> Memory {
        Memory {
            pid: std::process::id() as libc::pid_t,
            at: bytes.as_ptr() as u64,
            pages: (bytes.len() / PAGE) as u32,
        }
    }

    fn aligned(kinds: &[u8]) -> (Vec<u8>, usize) {
        let mut bytes = vec![0; (kinds.len() + 1) * PAGE];
        let skip = bytes.as_ptr().align_offset(PAGE);
        for (page, kind) in kinds.iter().enumerate() {
            // One byte is enough to be no zero page, wherever it lies.
            bytes[skip + page * PAGE + (usize::from(*kind) * 331) % PAGE] = *kind;
        }
        (bytes, skip)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn a_file_has_the_pages_of_its_runs_and_no_others(
            kinds in proptest::collection::vec(0u8..3, 1..900),
            steps in proptest::collection::vec((0u32..40, 1u32..400), 0..6),
        ) {
            let (bytes, skip) = aligned(&kinds);
            let bytes = &bytes[skip..skip + kinds.len() * PAGE];
            let pages = kinds.len() as u32;
            let (mut runs, mut at) = (Vec::new(), 0);
            for (gap, count) in steps {
                let first = (at + gap).min(pages);
                let count = count.min(pages - first);
                if count > 0 { extend(&mut runs, first, count); }
                at = first + count;
            }
            let path = std::env::temp_dir().join(format!("agentenv-save-{}", std::process::id()));
            let file = File::options().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            file.set_len(bytes.len() as u64).unwrap();
            let written = copy(memory(bytes), &runs).unwrap().write(&file).unwrap();
            prop_assert_eq!(&written, &write_through(memory(bytes), &runs, &file).unwrap());
            let mut wanted = vec![0; bytes.len()];
            let mut named = vec![None; kinds.len()];
            for run in &runs {
                for page in run.first as usize..(run.first + run.count) as usize {
                    wanted[page * PAGE..][..PAGE].copy_from_slice(&bytes[page * PAGE..][..PAGE]);
                    named[page] = Some(kinds[page] == 0);
                }
            }
            let mut found = vec![0; bytes.len()];
            file.read_exact_at(&mut found, 0).unwrap();
            prop_assert!(found == wanted);
            let mut told = vec![None; kinds.len()];
            for (first, count, zero) in &written.runs {
                told[*first as usize..(*first + *count) as usize].fill(Some(*zero));
            }
            prop_assert_eq!(told, named);
        }
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let memory = Memory {
            pid: std::process::id() as libc::pid_t,
            at: 4096,
            pages: 1,
        };
        assert!(copy(memory, &[Run { first: 0, count: 1 }]).is_err());
    }
}
