//! What of the store is on this machine: tables and chunks of layers, bounded in space.
//!
//! `DIR/ab/<id>.table` is the layer's table, `.data` its chunks (`file`), `.whole` says that all are
//! there. A layer that no open stack uses is closed: it goes as a whole, the one that was closed first
//! goes first. Of open layers single chunks go, by use (the clock algorithm: a chunk used since the
//! hand came by is passed over once), but never of a pinned one. Where nothing may go, a chunk is
//! used without being kept.

pub mod bits;
pub mod file;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::Serialize;

use agentenv_blocks::layer::Layer;
use agentenv_blocks::Id;

use crate::log;
use file::{mark_of, Buffer, LayerFile};

/// How full the cache may be.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes of chunks.
    pub size: u64,
    /// Bytes that stay free on the file system.
    pub free: u64,
}

/// Evictions free this part of what is here more than is asked for, so that they are few.
const SLACK: u64 = 64;
/// How the ending of a table in the making begins.
const DRAFT: &str = "draft-";

#[derive(Default, Debug, Serialize)]
pub struct Counters {
    pub evicted_bytes: AtomicU64,
    /// Chunks that found no room.
    pub unkept: AtomicU64,
}

/// The cache. Made by `open`.
pub struct Cache {
    dir: PathBuf,
    /// Tables of open layers that `dir` had no room for: a restarted server needs them.
    spare: PathBuf,
    bounds: Bounds,
    state: Mutex<State>,
    /// One eviction at a time.
    evicting: Mutex<()>,
    drafts: AtomicU64,
    pub counters: Counters,
}

#[derive(Default)]
struct State {
    open: HashMap<Id, (Arc<LayerFile>, usize)>,
    /// By the time of closing.
    closed: BTreeMap<(SystemTime, Id), u64>,
    closed_at: HashMap<Id, SystemTime>,
    closed_bytes: u64,
}

impl State {
    fn take_closed(&mut self, id: &Id) -> Option<u64> {
        let at = self.closed_at.remove(id)?;
        let bytes = self.closed.remove(&(at, *id))?;
        self.closed_bytes -= bytes;
        Some(bytes)
    }

    fn put_closed(&mut self, id: Id, at: SystemTime, bytes: u64) {
        self.take_closed(&id);
        self.closed_at.insert(id, at);
        self.closed.insert((at, id), bytes);
        self.closed_bytes += bytes;
    }

    fn bytes(&self) -> u64 {
        let open: u64 = self.open.values().map(|(file, _)| file.held()).sum();
        open + self.closed_bytes
    }
}

impl Cache {
    /// Finds what an earlier process left below `dir`, which is made if it is not there.
    pub fn open(dir: PathBuf, spare: PathBuf, bounds: Bounds) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        let cache = Self {
            dir,
            spare,
            bounds,
            state: Mutex::default(),
            evicting: Mutex::default(),
            drafts: AtomicU64::new(0),
            counters: Counters::default(),
        };
        cache.rescan(true)?;
        cache.make_room(0);
        Ok(cache)
    }

    /// Takes in files of layers that another process put here. `first`: what a dead writer left
    /// half done goes. Files that are not ours are left alone.
    pub fn rescan(&self, first: bool) -> io::Result<()> {
        for folder in fs::read_dir(&self.dir)?.flatten() {
            let Ok(files) = fs::read_dir(folder.path()) else {
                continue;
            };
            for file in files.flatten() {
                self.take_in(&folder.file_name(), &file.path(), first);
            }
        }
        Ok(())
    }

    fn take_in(&self, folder: &OsStr, path: &Path, first: bool) {
        let name = path.file_stem().and_then(OsStr::to_str).unwrap_or("");
        let kind = path.extension().and_then(OsStr::to_str).unwrap_or("");
        let Ok(id) = name.parse::<Id>() else {
            return;
        };
        if folder.to_str() != Some(&name[..2]) {
            return;
        }
        if !matches!(kind, "data" | "table" | "whole") {
            if first && kind.starts_with(DRAFT) {
                let _ = fs::remove_file(path);
            }
            return;
        }
        let Ok(about) = fs::metadata(path) else {
            return;
        };
        let at = about.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        let mut state = self.state.lock();
        if state.open.contains_key(&id) {
            return;
        }
        let bytes = match kind {
            "data" => std::os::unix::fs::MetadataExt::blocks(&about) * 512,
            _ => 0,
        };
        let at = state.closed_at.get(&id).map_or(at, |known| at.max(*known));
        let known = state.take_closed(&id).unwrap_or(0);
        state.put_closed(id, at, known.max(bytes));
    }

    /// A layer's table, if it is here.
    pub fn table(&self, id: &Id) -> Option<Vec<u8>> {
        let found = fs::read(self.path(id, "table"));
        found.or_else(|_| fs::read(self.spare(id))).ok()
    }

    /// Keeps a layer's table.
    pub fn keep_table(&self, id: &Id, bytes: &[u8]) -> io::Result<()> {
        let path = self.path(id, "table");
        fs::create_dir_all(path.parent().unwrap_or(&self.dir))?;
        if self.write_table(&path, bytes).is_ok() {
            return Ok(());
        }
        fs::create_dir_all(&self.spare)?;
        self.write_table(&self.spare(id), bytes)
    }

    fn write_table(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let number = self.drafts.fetch_add(1, Ordering::Relaxed);
        let draft = path.with_extension(format!("{DRAFT}{number}"));
        let done = fs::write(&draft, bytes).and_then(|()| fs::rename(&draft, path));
        done.inspect_err(|_| drop(fs::remove_file(&draft)))
    }

    /// The file of an open layer for as long as `release` is not called for it.
    pub fn join(&self, id: &Id) -> Option<Arc<LayerFile>> {
        let mut state = self.state.lock();
        let (file, users) = state.open.get_mut(id)?;
        *users += 1;
        Some(Arc::clone(file))
    }

    /// As `join`; the layer is opened if it is not open.
    pub fn acquire(&self, layer: Layer) -> io::Result<Arc<LayerFile>> {
        let id = layer.id();
        if let Some(file) = self.join(&id) {
            return Ok(file);
        }
        let path = self.path(&id, "data");
        fs::create_dir_all(path.parent().unwrap_or(&self.dir))?;
        // Not under the lock: looking through a large file takes its time. Of two at once, the
        // first counts; evicted meanwhile, what is kept in it is gone when it is closed.
        let made = Arc::new(LayerFile::open(path, Arc::new(layer))?);
        let mut state = self.state.lock();
        state.take_closed(&id);
        let (file, users) = state.open.entry(id).or_insert((made, 0));
        *users += 1;
        Ok(Arc::clone(file))
    }

    /// As `acquire`, for a layer that is here anyway.
    pub fn borrow_layer(&self, id: &Id) -> Option<Arc<LayerFile>> {
        if let Some(file) = self.join(id) {
            return Some(file);
        }
        let known = self.state.lock().closed_at.contains_key(id);
        let table = known.then(|| self.table(id)).flatten()?;
        self.acquire(Layer::decode(&table).ok()?).ok()
    }

    pub fn release(&self, file: &Arc<LayerFile>) {
        let id = file.layer().id();
        let mut state = self.state.lock();
        let Some((_, users)) = state.open.get_mut(&id) else {
            return;
        };
        *users -= 1;
        if *users > 0 {
            return;
        }
        state.open.remove(&id);
        let _ = fs::remove_file(self.spare(&id));
        let now = SystemTime::now();
        if let Ok(table) = fs::File::open(self.path(&id, "table")) {
            let _ = table.set_modified(now); // a later process goes by it
        }
        state.put_closed(id, now, file.held());
    }

    /// Bytes of chunks.
    pub fn bytes(&self) -> u64 {
        self.state.lock().bytes()
    }

    pub fn open_layers(&self) -> usize {
        self.state.lock().open.len()
    }

    /// Keeps a verified chunk if there is room for it.
    pub fn store(&self, file: &LayerFile, chunk: u32, plain: &Buffer) {
        if self.make_room(plain.len() as u64) && file.store(chunk, plain).is_ok() {
            return;
        }
        self.counters.unkept.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether so many bytes more have room, by taking others' if need be.
    fn make_room(&self, bytes: u64) -> bool {
        let lacking = self.lacking(bytes);
        if lacking == 0 {
            return true;
        }
        let _one = self.evicting.lock();
        let lacking = self.lacking(bytes);
        lacking == 0 || self.evict(lacking + self.bytes() / SLACK) >= lacking
    }

    fn lacking(&self, bytes: u64) -> u64 {
        let over = (self.bytes() + bytes).saturating_sub(self.bounds.size);
        let free = rustix::fs::statvfs(&self.dir).map_or(u64::MAX, |fs| fs.f_bavail * fs.f_frsize);
        over.max((self.bounds.free + bytes).saturating_sub(free))
    }

    fn evict(&self, wanted: u64) -> u64 {
        let mut freed = self.evict_closed(wanted);
        let open: Vec<_> = self
            .state
            .lock()
            .open
            .values()
            .map(|(file, _)| file.clone())
            .collect();
        // Twice around: the first may do no more than clear the marks of use.
        for file in open.iter().chain(&open) {
            if file.pinned() {
                continue;
            }
            for chunk in 0..file.layer().chunk_count() {
                if freed >= wanted {
                    break;
                }
                freed += file.evict(chunk);
            }
        }
        self.counters
            .evicted_bytes
            .fetch_add(freed, Ordering::Relaxed);
        freed
    }

    fn evict_closed(&self, wanted: u64) -> u64 {
        let mut freed = 0;
        while freed < wanted {
            let mut state = self.state.lock();
            let Some((&(at, id), &bytes)) = state.closed.iter().next() else {
                break;
            };
            state.take_closed(&id);
            let path = self.path(&id, "data");
            for path in [mark_of(&path), path, self.path(&id, "table")] {
                match fs::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        log::line(format_args!(
                            "{} cannot be removed: {error}",
                            path.display()
                        ));
                        let later = at + Duration::from_secs(3600);
                        state.put_closed(id, later.max(SystemTime::now()), bytes);
                        return freed;
                    }
                    _ => {}
                }
            }
            freed += bytes;
        }
        freed
    }

    fn spare(&self, id: &Id) -> PathBuf {
        self.spare.join(format!("{id}.table"))
    }

    fn path(&self, id: &Id, kind: &str) -> PathBuf {
        let name = id.to_string();
        self.dir.join(&name[..2]).join(format!("{name}.{kind}"))
    }
}

#[cfg(test)]
#[path = "cache_test.rs"]
mod tests;
