//! One layer's part of the cache: a sparse file in the layer's own layout.
//!
//! A block of the layer lies at its own offset, what is not here is a hole. So a layer that is whole
//! is a plain flat file, and what is here can be told from the file itself after any crash: the
//! chunks whose blocks are all allocated. Such chunks are verified when they are first used.
//!
//! Reads go around the page cache (O_DIRECT, where the file system has it): the kernel keeps what it
//! reads from us already.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use aligned_vec::{AVec, ConstAlign};
use parking_lot::RwLock;
use rustix::fs::{fallocate, seek, FallocateFlags, OFlags, SeekFrom};
use rustix::io::Errno;

use agentenv_blocks::layer::Layer;
use agentenv_blocks::{chunk, BLOCK};

use super::bits::Bits;
use crate::log;

/// Memory that the kernel can read files into directly.
pub type Buffer = AVec<u8, ConstAlign<BLOCK>>;

/// A zeroed buffer of so many bytes.
pub fn buffer(bytes: usize) -> Buffer {
    let mut made = Buffer::new(BLOCK);
    made.resize(bytes, 0);
    made
}

/// A layer and what of it is here.
pub struct LayerFile {
    layer: Arc<Layer>,
    /// As `layer`; where its chunks lie in the store may have changed since.
    places: RwLock<Arc<Layer>>,
    path: PathBuf,
    file: File,
    present: Bits,
    verified: Bits,
    used: Bits,
    /// Bytes of the chunks that are present.
    held: AtomicU64,
    pins: AtomicU32,
    whole: AtomicBool,
    /// Held shared by who reads, alone by who takes away.
    gate: RwLock<()>,
}

impl LayerFile {
    /// Opens or makes the file at `path` and finds what it holds.
    pub fn open(path: PathBuf, layer: Arc<Layer>) -> io::Result<Self> {
        let size = u64::from(layer.blocks()) * BLOCK as u64;
        let file = open_direct(&path)?;
        let trusted = vouched(&path, &file, &layer)?;
        if file.metadata()?.len() != size {
            file.set_len(size)?;
        }
        let chunks = layer.chunk_count();
        let found = Self {
            places: RwLock::new(Arc::clone(&layer)),
            layer,
            file,
            present: Bits::new(chunks),
            verified: Bits::new(chunks),
            used: Bits::new(chunks),
            held: AtomicU64::new(0),
            pins: AtomicU32::new(0),
            whole: AtomicBool::new(false),
            gate: RwLock::new(()),
            path,
        };
        found.scan(trusted)?;
        Ok(found)
    }

    fn scan(&self, trusted: bool) -> io::Result<()> {
        let mut at = 0;
        for chunk in 0..self.layer.chunk_count() {
            if !trusted && !self.allocated(chunk, &mut at)? {
                continue;
            }
            self.now_present(chunk);
            if trusted {
                self.verified.set(chunk);
            }
        }
        self.whole.store(trusted, Ordering::Release);
        Ok(())
    }

    /// Whether all blocks of a chunk are data. `known` is the end of the data run found last.
    fn allocated(&self, chunk: u32, known: &mut u64) -> io::Result<bool> {
        for (first, count) in self.runs(chunk) {
            let (begin, end) = (offset(first), offset(first + count));
            if *known >= end {
                continue; // runs come in order, and this one lies in data seen before
            }
            match seek(&self.file, SeekFrom::Data(begin)) {
                Ok(data) if data == begin => {}
                Ok(_) | Err(Errno::NXIO) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
            *known = seek(&self.file, SeekFrom::Hole(begin))?;
            if *known < end {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn now_present(&self, chunk: u32) {
        if self.present.set(chunk) {
            let bytes = self.layer.entry(chunk).bytes() as u64;
            self.held.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    pub fn layer(&self) -> &Arc<Layer> {
        &self.layer
    }

    /// The layer as the store has it, as far as known.
    pub fn places(&self) -> Arc<Layer> {
        Arc::clone(&self.places.read())
    }

    /// Where its chunks lie by now. Refuses another layer.
    pub fn moved(&self, layer: Layer) -> bool {
        let same = layer.id() == self.layer.id();
        if same {
            *self.places.write() = Arc::new(layer);
        }
        same
    }

    /// Whether all chunks are here.
    pub fn complete(&self) -> bool {
        self.held() == u64::from(self.layer.data_blocks()) * BLOCK as u64
    }

    /// Bytes of chunks that are here.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// The file, if all of the layer is here: the layer's blocks at their own offsets.
    pub fn whole(&self) -> Option<&File> {
        self.whole.load(Ordering::Acquire).then_some(&self.file)
    }

    pub fn pin(&self) {
        let _gate = self.gate.read(); // never in the midst of an eviction
        self.pins.fetch_add(1, Ordering::AcqRel);
    }

    pub fn unpin(&self) {
        self.pins.fetch_sub(1, Ordering::AcqRel);
    }

    pub fn pinned(&self) -> bool {
        self.pins.load(Ordering::Acquire) > 0
    }

    /// Whether a chunk can be read here as it is.
    pub fn has(&self, chunk: u32) -> bool {
        self.present.get(chunk) && self.verified.get(chunk)
    }

    /// Whether a chunk's blocks are here, verified or not.
    pub fn may_have(&self, chunk: u32) -> bool {
        self.present.get(chunk)
    }

    /// Marks a chunk as used.
    pub fn touch(&self, chunk: u32) {
        self.used.set(chunk);
    }

    /// Reads blocks that lie in one extent, at `data` in the layer's data; false if one is not here.
    pub fn read(&self, block: u32, data: u32, out: &mut [u8]) -> bool {
        let last = self.layer.chunk_at(data + (out.len() / BLOCK) as u32 - 1);
        let chunks = self.layer.chunk_at(data)..=last;
        let done = {
            let _gate = self.gate.read();
            if !chunks.clone().all(|chunk| self.has(chunk)) {
                return false;
            }
            self.file.read_exact_at(out, offset(block))
        };
        match done {
            Ok(()) => chunks.for_each(|chunk| self.touch(chunk)),
            Err(error) => {
                let path = self.path.display();
                log::line(format_args!("{path} cannot be read: {error}"));
                for chunk in chunks {
                    self.discard(chunk);
                }
                return false;
            }
        }
        true
    }

    /// Reads a chunk that is here and verifies it; None if it is not here or damaged.
    pub fn load(&self, chunk: u32) -> Option<Buffer> {
        let mut plain = buffer(self.layer.entry(chunk).bytes());
        let done = {
            let _gate = self.gate.read();
            self.present.get(chunk)
                && self
                    .each_run(chunk, |part, at| {
                        self.file.read_exact_at(&mut plain[part], at)
                    })
                    .is_ok()
        };
        if !done || chunk::verify(&self.layer.entry(chunk).id, &plain).is_err() {
            return None;
        }
        self.verified.set(chunk);
        self.touch(chunk);
        Some(plain)
    }

    /// Keeps a verified chunk. On failure it is as if it never came.
    pub fn store(&self, chunk: u32, plain: &Buffer) -> io::Result<()> {
        let _gate = self.gate.read();
        let write = |part: Range<usize>, at| self.file.write_all_at(&plain[part], at);
        if let Err(error) = self.each_run(chunk, write) {
            let _ = self.punch(chunk);
            return Err(error);
        }
        self.now_present(chunk);
        self.verified.set(chunk);
        self.touch(chunk);
        Ok(())
    }

    /// Says on disk that all is here, if it is, so that the next start need not look at each chunk.
    pub fn settle(&self) -> io::Result<()> {
        if !self.complete() {
            return Ok(());
        }
        let _gate = self.gate.read(); // nothing is taken away meanwhile
        let all = || (0..self.layer.chunk_count()).all(|chunk| self.has(chunk));
        if !self.whole.load(Ordering::Acquire) && all() {
            self.file.sync_all()?;
            File::create(self.mark())?;
            self.whole.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Takes a chunk away unless it was used since the last call, or the layer is pinned; the bytes
    /// that came free.
    pub fn evict(&self, chunk: u32) -> u64 {
        if self.pinned() || !self.present.get(chunk) || self.used.clear(chunk) {
            return 0;
        }
        let _gate = self.gate.write();
        if self.pinned() {
            return 0;
        }
        let bytes = self.forget(chunk);
        let _ = self.punch(chunk);
        bytes
    }

    /// Forgets a damaged chunk, whoever uses the layer. Its place is not punched: the kernel may
    /// read the file by itself, and must not find zeroes; a fetched one will take the place.
    pub fn discard(&self, chunk: u32) -> u64 {
        let _gate = self.gate.write();
        self.forget(chunk)
    }

    fn forget(&self, chunk: u32) -> u64 {
        if self.whole.swap(false, Ordering::AcqRel) {
            let _ = std::fs::remove_file(self.mark());
        }
        self.verified.clear(chunk);
        if !self.present.clear(chunk) {
            return 0;
        }
        let bytes = self.layer.entry(chunk).bytes() as u64;
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        bytes
    }

    fn punch(&self, chunk: u32) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for (first, count) in self.runs(chunk) {
            fallocate(&self.file, flags, offset(first), offset(count))?;
        }
        Ok(())
    }

    /// For each run of a chunk: its part of the plain bytes, its offset in the file.
    fn each_run(
        &self,
        chunk: u32,
        mut act: impl FnMut(Range<usize>, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut at = 0;
        for (first, count) in self.runs(chunk) {
            let end = at + count as usize * BLOCK;
            act(at..end, offset(first))?;
            at = end;
        }
        Ok(())
    }

    fn runs(&self, chunk: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let blocks = self.layer.entry(chunk).blocks.into();
        self.layer.runs(self.layer.begin(chunk), blocks)
    }

    fn mark(&self) -> PathBuf {
        mark_of(&self.path)
    }
}

/// The file beside a layer's that says that all of it is here.
pub fn mark_of(path: &Path) -> PathBuf {
    path.with_extension("whole")
}

/// Whether the mark beside the file vouches for it: made later than the last change (the
/// clock of files ticks slowly: the same time may be before it), and nothing is gone.
fn vouched(path: &Path, file: &File, layer: &Layer) -> io::Result<bool> {
    let Ok(mark) = std::fs::metadata(mark_of(path)) else {
        return Ok(false);
    };
    let about = file.metadata()?;
    let whole = about.len() == u64::from(layer.blocks()) * BLOCK as u64
        && about.blocks() * 512 >= u64::from(layer.data_blocks()) * BLOCK as u64
        && mark.modified()? > about.modified()?;
    if !whole {
        std::fs::remove_file(mark_of(path))?;
    }
    Ok(whole)
}

fn offset(block: u32) -> u64 {
    u64::from(block) * BLOCK as u64
}

fn open_direct(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600);
    let direct = OFlags::DIRECT.bits() as i32;
    match options.clone().custom_flags(direct).open(path) {
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            options.open(path)
        }
        opened => opened,
    }
}
