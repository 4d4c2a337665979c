//! Serves the files of a folder on a mounted `/dev/fuse` descriptor; for tests of the transport.
//!
//! `folder FD DIR STATE [passthrough]`: STATE is a file that keeps what a next server needs; with
//! `AENV_RESTARTS` above 0 the connection is adopted. While `STATE.hold` exists no read is answered
//! (`STATE.reading` then says that one waits).

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agentenv_fuse::{Attr, Connection, Errno, Files, Negotiated, Opened, ReadReply, Start};
use serde::{Deserialize, Serialize};

#[derive(Clone, Default, Serialize, Deserialize)]
struct State {
    negotiated: Option<Negotiated>,
    backing: HashMap<u64, i32>,
}

struct Folder {
    names: Vec<(String, Arc<File>)>,
    connection: Arc<Connection>,
    path: PathBuf,
    passthrough: bool,
    state: Mutex<State>,
}

impl Folder {
    fn file(&self, node: u64) -> Option<&Arc<File>> {
        let index = usize::try_from(node).ok()?.checked_sub(2)?;
        self.names.get(index).map(|(_, file)| file)
    }

    fn store(&self, state: &State) {
        let fresh = self.path.with_extension("new");
        fs::write(&fresh, serde_json::to_vec(state).expect("plain values")).expect("state");
        fs::rename(&fresh, &self.path).expect("state");
    }

    fn backing(&self, node: u64) -> Option<i32> {
        let mut state = self.state.lock().expect("no panic under the lock");
        if let Some(known) = state.backing.get(&node) {
            return Some(*known);
        }
        let id = self.connection.backing_open(self.file(node)?).ok()?;
        state.backing.insert(node, id);
        self.store(&state);
        Some(id)
    }
}

impl Files for Folder {
    fn lookup(&self, name: &[u8]) -> Option<Attr> {
        let mut all = self.list().into_iter();
        all.find(|(known, _)| known == name).map(|(_, attr)| attr)
    }

    fn attr(&self, node: u64) -> Option<Attr> {
        let size = self.file(node)?.metadata().ok()?.len();
        Some(Attr { node, size })
    }

    fn list(&self) -> Vec<(Vec<u8>, Attr)> {
        let named = self.names.iter().zip(2..);
        named
            .filter_map(|((name, _), node)| Some((name.clone().into_bytes(), self.attr(node)?)))
            .collect()
    }

    fn open(&self, node: u64) -> Result<Opened, Errno> {
        let passthrough = self.passthrough.then(|| self.backing(node)).flatten();
        Ok(Opened { passthrough })
    }

    fn release(&self, _: u64) {}

    fn read(&self, node: u64, offset: u64, size: u32, reply: ReadReply) {
        let Some(file) = self.file(node).cloned() else {
            return reply.error(Errno::STALE);
        };
        let hold = self.path.with_extension("hold");
        let answer = move || {
            let mut bytes = vec![0; size as usize];
            match file.read_exact_at(&mut bytes, offset) {
                Ok(()) => reply.data(&bytes),
                Err(_) => reply.error(Errno::IO),
            }
        };
        if !hold.exists() {
            return answer();
        }
        fs::write(self.path.with_extension("reading"), b"").expect("state");
        std::thread::spawn(move || {
            while hold.exists() {
                std::thread::sleep(Duration::from_millis(10));
            }
            answer();
        });
    }

    fn negotiated(&self, with: &Negotiated) {
        let mut state = self.state.lock().expect("no panic under the lock");
        state.negotiated = Some(*with);
        self.store(&state);
    }
}

fn names(folder: &Path) -> Vec<(String, Arc<File>)> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .expect("the folder")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .into_string()
                .expect("UTF-8")
        })
        .collect();
    names.sort();
    let open = |name: String| {
        let file = File::open(folder.join(&name)).expect("a readable file");
        (name, Arc::new(file))
    };
    names.into_iter().map(open).collect()
}

fn main() -> std::io::Result<()> {
    let words: Vec<String> = std::env::args().collect();
    let fd = words[1].parse().expect("a descriptor's number");
    // SAFETY: whoever started this process passed the descriptor of this number to it; nothing
    // else here uses the number, so this is its only owner.
    let connection = Connection::new(unsafe { OwnedFd::from_raw_fd(fd) });
    let path = PathBuf::from(&words[3]);
    let state: State = fs::read(&path)
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default();
    let restarted = std::env::var("AENV_RESTARTS").is_ok_and(|count| count != "0");
    let start = match restarted {
        true => Start::Adopted(state.negotiated),
        false => Start::Fresh,
    };
    let folder = Folder {
        names: names(Path::new(&words[2])),
        connection: connection.clone(),
        path,
        passthrough: words.get(4).is_some_and(|word| word == "passthrough"),
        state: Mutex::new(state),
    };
    connection.serve(Arc::new(folder), 4, start)
}
