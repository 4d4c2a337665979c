//! The file that an upload makes or replaces: afterwards it is whole, or as it was.
//!
//! A new file is written where it is. What would replace content is first gathered aside (small
//! files in memory), then room is reserved, and only then the old content is overwritten: in place,
//! so that links, readers and watchers see the file they knew.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use super::metadata::{self, Metadata};
use super::operations;
use crate::sys;
use crate::users::User;

/// Files up to this size are held in memory until all of it has come.
const SMALL: usize = 256 << 10;

/// Where the content goes and whose it will be.
#[derive(Clone)]
pub struct Wanted {
    pub path: PathBuf,
    pub owner: User,
    pub metadata: Metadata,
}

/// A sink for one file's content, used by who has its `turn`; `finish` it, or it is undone.
pub struct Target {
    wanted: Wanted,
    begun: Vec<u8>,
    open: Option<Open>,
}

/// What the path was before us.
#[derive(Clone, Copy, PartialEq)]
enum Before {
    Missing,
    Empty,
    Content,
}

struct Open {
    file: File,
    before: Before,
    /// Gathers what is to replace the file's content.
    aside: Option<File>,
}

impl Target {
    pub fn new(wanted: Wanted) -> Self {
        Self {
            wanted,
            begun: Vec::new(),
            open: None,
        }
    }

    /// All content has been written: put it in its place.
    pub fn finish(mut self) -> io::Result<()> {
        let Some(mut open) = self.open.take() else {
            let mut open = Open::at(&self.wanted)?;
            let content = std::mem::take(&mut self.begun);
            let outcome = open.replace(&mut content.as_slice(), content.len() as u64);
            return open.close(&self.wanted, outcome);
        };
        let outcome = match open.aside.take() {
            None => Ok(()),
            Some(mut aside) => aside.stream_position().and_then(|size| {
                aside.rewind()?;
                open.replace(&mut aside, size)
            }),
        };
        open.close(&self.wanted, outcome)
    }

    fn open(&mut self) -> io::Result<()> {
        let mut open = Open::at(&self.wanted)?;
        if open.before == Before::Content {
            open.aside = Some(nameless(&self.wanted.path)?);
        }
        self.open = Some(open);
        let begun = std::mem::take(&mut self.begun);
        self.write_all(&begun)
    }
}

impl Write for Target {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.open.is_none() {
            if self.begun.len() + data.len() <= SMALL {
                self.begun.extend_from_slice(data);
                return Ok(data.len());
            }
            self.open()?;
        }
        let open = self.open.as_mut().expect("opened above");
        open.aside.as_mut().unwrap_or(&mut open.file).write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            open.undo(&self.wanted.path);
        }
    }
}

impl Open {
    /// Open it, make what is missing above. Watchers see create, chmod, write: the order of E2B's
    /// agent.
    fn at(wanted: &Wanted) -> io::Result<Self> {
        let path = &wanted.path;
        if let Some(parent) = path.parent() {
            operations::make_parents(parent, &wanted.owner)?;
        }
        let is_new = fs::symlink_metadata(path).is_err();
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false) // the old content may have to stay
            .mode(0o644)
            // A pipe without a reader would keep this thread for ever.
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file",
            ));
        }
        let open = Self {
            file,
            before: match found.len() {
                0 if is_new => Before::Missing,
                0 => Before::Empty,
                _ => Before::Content,
            },
            aside: None,
        };
        let noted = match open.before {
            Before::Missing => open.note(wanted),
            Before::Empty | Before::Content => Ok(()), // once the content is whole
        };
        match noted {
            Ok(()) => Ok(open),
            Err(failure) => {
                open.undo(path);
                Err(failure)
            }
        }
    }

    fn note(&self, wanted: &Wanted) -> io::Result<()> {
        sys::fchown(&self.file, wanted.owner.uid, wanted.owner.gid)?;
        metadata::replace(&self.file, &wanted.metadata)
    }

    /// Overwrite with `size` bytes of `content`, for which there is room once writing begins.
    fn replace(&mut self, content: &mut impl io::Read, size: u64) -> io::Result<()> {
        let old = self.file.metadata()?;
        let has_holes = old.blocks() * 512 < old.len();
        if old.len() > 0 && (size > old.len() || has_holes) {
            sys::reserve(&self.file, size)?;
        }
        self.file.seek(SeekFrom::Start(0))?;
        io::copy(content, &mut self.file)?;
        if size < old.len() {
            self.file.set_len(size)?;
        }
        Ok(())
    }

    fn close(self, wanted: &Wanted, outcome: io::Result<()>) -> io::Result<()> {
        let outcome = outcome.and_then(|()| match self.before {
            Before::Missing => Ok(()), // it is noted from the start
            Before::Empty | Before::Content => self.note(wanted),
        });
        if outcome.is_err() {
            self.undo(&wanted.path);
        }
        outcome
    }

    /// What was not there, or was empty, is so again.
    fn undo(self, path: &Path) {
        let _ = match self.before {
            Before::Missing => fs::remove_file(path),
            Before::Empty => self.file.set_len(0),
            Before::Content => Ok(()),
        };
    }
}

/// A file without a name on the file system of `path`, gone when it is closed.
fn nameless(path: &Path) -> io::Result<File> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    OpenOptions::new()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_TMPFILE)
        .open(folder)
}

type Turns = HashMap<PathBuf, Weak<AsyncMutex<()>>>;

/// Wait for the right to write a path: two who do so at once would mix what they write.
pub async fn turn(path: &Path) -> OwnedMutexGuard<()> {
    static TURNS: Mutex<Option<Turns>> = Mutex::new(None);
    let turn = {
        let mut turns = TURNS.lock().expect("no holder panics");
        let turns = turns.get_or_insert_default();
        turns.retain(|_, turn| turn.strong_count() > 0);
        let known = turns.get(path).and_then(Weak::upgrade);
        let turn = known.unwrap_or_default();
        turns.insert(path.to_owned(), Arc::downgrade(&turn));
        turn
    };
    turn.lock_owned().await
}
