//! Watching folders: inotify's events in the protocol's words (E2B.md §2.4).
//!
//! One inotify instance a watch. Events are read when somebody asks, or by who waits, so that what
//! was done before a request is always among the events that it is given.

use std::collections::HashMap;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde_json::{json, Value};
use tokio::io::unix::AsyncFd;

use super::entry::describe;
use crate::sys;
use crate::users::Database;

const MASK: u32 = libc::IN_CREATE
    | libc::IN_MODIFY
    | libc::IN_ATTRIB
    | libc::IN_DELETE
    | libc::IN_MOVED_FROM
    | libc::IN_MOVED_TO
    | libc::IN_ONLYDIR;
/// inotify(7): an event is this head, then a name padded with NULs.
const HEAD: usize = 16;
const BUFFER: usize = 64 << 10;
/// Events kept for a client that does not come for them.
const MAX_KEPT: usize = 100_000;
/// Magic numbers of statfs(2): NFS, CIFS, SMB2, FUSE; their changes elsewhere are not seen.
const NETWORK: [i64; 4] = [0x6969, 0xFF53_4D42, 0xFE53_4D42, 0x6573_5546];

#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    pub recursive: bool,
    pub include_entry: bool,
    pub allow_network: bool,
}

/// More happened than could be kept.
pub struct Overflow;

pub struct Watch {
    inotify: AsyncFd<std::fs::File>,
    root: PathBuf,
    options: Options,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Watched folders by watch descriptor, relative to the root.
    folders: HashMap<i32, PathBuf>,
    events: Vec<Value>,
    overflowed: bool,
}

impl Watch {
    /// Watch the folder at `root`. Errors as the system gives them; NotADirectory for a file.
    pub fn open(root: &Path, options: Options) -> io::Result<Self> {
        let file = std::fs::File::from(sys::inotify()?);
        // SAFETY: the file owns its descriptor, nothing swaps or closes it while it is registered.
        let inotify = unsafe { AsyncFd::register(file) }?;
        let watch = Self {
            inotify,
            root: root.to_owned(),
            options,
            state: Mutex::default(),
        };
        {
            let mut state = watch.state.lock().expect("no holder panics");
            watch.add(&mut state, PathBuf::new())?;
        }
        Ok(watch)
    }

    /// Whether the folder lies where changes by others are not told to this kernel.
    pub fn is_network(root: &Path) -> io::Result<bool> {
        Ok(NETWORK.contains(&sys::file_system_kind(root)?))
    }

    /// Watch a folder and, if so wanted, those in it. Only the first may fail.
    fn add(&self, state: &mut State, folder: PathBuf) -> io::Result<()> {
        let path = self.root.join(&folder);
        let descriptor = sys::add_watch(self.inotify.as_raw_fd(), &path, MASK)?;
        state.folders.insert(descriptor, folder.clone());
        if !self.options.recursive {
            return Ok(());
        }
        for item in std::fs::read_dir(&path)?.flatten() {
            if item.file_type().is_ok_and(|kind| kind.is_dir()) {
                // Gone meanwhile, or closed to us: as if it were not there.
                let _ = self.add(state, folder.join(item.file_name()));
            }
        }
        Ok(())
    }

    /// Everything that happened since the last call.
    pub fn take(&self) -> Result<Vec<Value>, Overflow> {
        self.collect();
        let mut state = self.state.lock().expect("no holder panics");
        if std::mem::take(&mut state.overflowed) {
            state.events.clear();
            return Err(Overflow);
        }
        Ok(std::mem::take(&mut state.events))
    }

    /// Wait until something happened.
    pub async fn changed(&self) -> io::Result<()> {
        self.inotify
            .readable()
            .await
            .map(|mut ready| ready.clear_ready())
    }

    /// Read what the kernel has, so that its queue does not overflow.
    pub fn collect(&self) {
        let mut state = self.state.lock().expect("no holder panics");
        let mut buffer = vec![0; BUFFER];
        while let Ok(read @ 1..) = self.inotify.get_ref().read(&mut buffer) {
            let mut rest = &buffer[..read];
            while rest.len() >= HEAD {
                let number = |at: usize| {
                    i32::from_ne_bytes(rest[at..at + 4].try_into().expect("four bytes"))
                };
                let (descriptor, mask) = (number(0), number(4) as u32);
                let end = HEAD + number(12) as usize;
                let name = rest[HEAD..end].split(|byte| *byte == 0).next();
                let name = String::from_utf8_lossy(name.unwrap_or_default()).into_owned();
                rest = &rest[end..];
                self.note(&mut state, descriptor, mask, &name);
            }
        }
    }

    fn note(&self, state: &mut State, descriptor: i32, mask: u32, name: &str) {
        if mask & libc::IN_Q_OVERFLOW != 0 {
            state.overflowed = true;
            return;
        }
        if mask & libc::IN_IGNORED != 0 {
            state.folders.remove(&descriptor);
            return;
        }
        let Some(folder) = state.folders.get(&descriptor) else {
            return;
        };
        if name.is_empty() {
            return; // of the watched folder itself
        }
        let relative = folder.join(name);
        if self.options.recursive && mask & libc::IN_ISDIR != 0 {
            self.follow(state, mask, &relative);
        }
        let Some(kind) = kind(mask) else { return };
        let mut event = json!({"name": relative.to_string_lossy(), "type": kind});
        let lasting = matches!(
            kind,
            "EVENT_TYPE_CREATE" | "EVENT_TYPE_WRITE" | "EVENT_TYPE_CHMOD"
        );
        if self.options.include_entry && lasting {
            if let Ok(entry) = describe(&self.root.join(&relative), &Database::load()) {
                event["entry"] = entry;
            }
        }
        if state.events.len() >= MAX_KEPT {
            state.overflowed = true;
        } else {
            state.events.push(event);
        }
    }

    /// Folders that come are watched, those that are moved away no more.
    fn follow(&self, state: &mut State, mask: u32, folder: &Path) {
        if mask & (libc::IN_CREATE | libc::IN_MOVED_TO) != 0 {
            let _ = self.add(state, folder.to_owned());
        }
        if mask & libc::IN_MOVED_FROM != 0 {
            let gone: Vec<i32> = state
                .folders
                .iter()
                .filter(|(_, path)| path.starts_with(folder))
                .map(|(descriptor, _)| *descriptor)
                .collect();
            for descriptor in gone {
                state.folders.remove(&descriptor);
                sys::remove_watch(self.inotify.as_raw_fd(), descriptor);
            }
        }
    }
}

/// As Go's fsnotify maps inotify, which is what E2B's users see.
fn kind(mask: u32) -> Option<&'static str> {
    const KINDS: [(u32, &str); 5] = [
        (libc::IN_CREATE | libc::IN_MOVED_TO, "EVENT_TYPE_CREATE"),
        (libc::IN_MODIFY, "EVENT_TYPE_WRITE"),
        (libc::IN_DELETE, "EVENT_TYPE_REMOVE"),
        (libc::IN_MOVED_FROM, "EVENT_TYPE_RENAME"),
        (libc::IN_ATTRIB, "EVENT_TYPE_CHMOD"),
    ];
    let found = KINDS.iter().find(|(bits, _)| mask & bits != 0);
    found.map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("watch-{name}-{}", std::process::id()));
            fs::create_dir(&path).expect("a fresh folder");
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn seen(watch: &Watch) -> Vec<(String, String)> {
        let events = watch.take().ok().expect("no overflow");
        let text = |event: &Value, key: &str| event[key].as_str().unwrap_or_default().to_owned();
        events
            .iter()
            .map(|event| (text(event, "name"), text(event, "type")[11..].to_owned()))
            .collect()
    }

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter()
            .map(|(name, kind)| ((*name).to_owned(), (*kind).to_owned()))
            .collect()
    }

    #[tokio::test]
    async fn what_happens_is_told_in_order() {
        let folder = Folder::new("order");
        let watch = Watch::open(&folder.0, Options::default()).expect("a folder");
        let path = folder.0.join("a");
        fs::write(&path, "x").expect("written");
        fs::rename(&path, folder.0.join("b")).expect("renamed");
        fs::remove_file(folder.0.join("b")).expect("removed");
        let wanted = [
            ("a", "CREATE"),
            ("a", "WRITE"),
            ("a", "RENAME"),
            ("b", "CREATE"),
        ];
        assert_eq!(
            seen(&watch),
            pairs(&[&wanted[..], &[("b", "REMOVE")]].concat())
        );
        assert!(seen(&watch).is_empty());
    }

    #[tokio::test]
    async fn new_folders_are_watched_and_moved_ones_no_more() {
        let folder = Folder::new("deep");
        let options = Options {
            recursive: true,
            ..Options::default()
        };
        let watch = Watch::open(&folder.0, options).expect("a folder");
        fs::create_dir(folder.0.join("d")).expect("made");
        assert_eq!(seen(&watch), pairs(&[("d", "CREATE")]));
        fs::create_dir(folder.0.join("d/e")).expect("made");
        assert_eq!(seen(&watch), pairs(&[("d/e", "CREATE")]));
        fs::write(folder.0.join("d/e/f"), "").expect("written");
        assert_eq!(seen(&watch), pairs(&[("d/e/f", "CREATE")]));
        let outside = Folder::new("outside");
        fs::rename(folder.0.join("d"), outside.0.join("d")).expect("moved");
        assert_eq!(seen(&watch), pairs(&[("d", "RENAME")]));
        fs::write(outside.0.join("d/e/g"), "").expect("written");
        assert!(seen(&watch).is_empty());
    }

    #[tokio::test]
    async fn a_file_and_nothing_are_refused() {
        let folder = Folder::new("refused");
        fs::write(folder.0.join("f"), "").expect("written");
        let kind = |name: &str| {
            let opened = Watch::open(&folder.0.join(name), Options::default());
            opened.err().expect("refused").kind()
        };
        assert_eq!(kind("f"), io::ErrorKind::NotADirectory);
        assert_eq!(kind("none"), io::ErrorKind::NotFound);
    }
}
