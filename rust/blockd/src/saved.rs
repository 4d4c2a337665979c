//! What a restarted server must know again, in a folder: a file for each stack, what the kernel agreed
//! to, the first node number not yet given out. The folder lives in memory: nothing is synced.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use agentenv_fuse::Negotiated;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::log;
use crate::open::Fault;
use crate::registry::{Mode, Spec};

const FIRST_NODE: u64 = 2;

/// An open stack.
#[derive(Clone, Serialize, Deserialize)]
pub struct Saved {
    pub spec: Spec,
    pub node: u64,
    pub holders: BTreeSet<String>,
    pub mode: Mode,
    /// How often its file is open.
    pub opens: u64,
}

/// Stacks that cannot be opened again yet: what the kernel asks of them waits.
#[derive(Default)]
pub struct Lost(Mutex<BTreeMap<u64, (Saved, Fault)>>);

impl Lost {
    pub fn add(&self, saved: Saved, fault: Fault) {
        self.0.lock().insert(saved.node, (saved, fault));
    }

    pub fn has(&self, node: u64) -> bool {
        self.0.lock().contains_key(&node)
    }

    /// The length in blocks of one of them.
    pub fn blocks(&self, node: u64) -> Option<u32> {
        let lost = self.0.lock();
        lost.get(&node).map(|(saved, _)| saved.spec.blocks)
    }

    pub fn remove(&self, node: u64) {
        self.0.lock().remove(&node);
    }

    pub fn all(&self) -> Vec<(Saved, Fault)> {
        self.0.lock().values().cloned().collect()
    }

    /// Takes holders away; the names of stacks that nobody holds any more, which are forgotten.
    pub fn let_go(&self, gone: impl Fn(&str) -> bool) -> Vec<String> {
        let mut names = Vec::new();
        self.0.lock().retain(|_, (saved, _)| {
            saved.holders.retain(|holder| !gone(holder));
            if saved.holders.is_empty() {
                names.extend(saved.spec.ids().map(|(_, id)| id.to_string()));
            }
            !saved.holders.is_empty()
        });
        names
    }
}

pub struct Folder {
    path: PathBuf,
    /// One change at a time.
    changing: Mutex<()>,
}

impl Folder {
    /// Made if it is not there.
    pub fn open(path: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&path)?;
        let changing = Mutex::default();
        Ok(Self { path, changing })
    }

    pub fn save(&self, name: &str, saved: &Saved) -> io::Result<()> {
        self.write(&format!("{name}.stack"), &serde_json::to_vec(saved)?)
    }

    pub fn forget(&self, name: &str) {
        let _ = fs::remove_file(self.path.join(format!("{name}.stack")));
    }

    /// What the server before us had open.
    pub fn stacks(&self) -> Vec<Saved> {
        let stacks = self.files().into_iter();
        stacks.filter_map(|path| read(&path)).collect()
    }

    /// Nothing of an earlier mount counts, except its node numbers.
    pub fn clear(&self) {
        for path in self.files() {
            let _ = fs::remove_file(path);
        }
        let _ = fs::remove_file(self.path.join("negotiated"));
    }

    fn files(&self) -> Vec<PathBuf> {
        let Ok(files) = fs::read_dir(&self.path) else {
            return Vec::new();
        };
        let paths = files.flatten().map(|file| file.path());
        paths
            .filter(|path| path.extension().is_some_and(|kind| kind == "stack"))
            .collect()
    }

    /// The first node number not yet given out.
    pub fn next_node(&self) -> u64 {
        let text = fs::read_to_string(self.path.join("next-node")).unwrap_or_default();
        text.trim().parse().unwrap_or(FIRST_NODE)
    }

    pub fn set_next_node(&self, number: u64) -> io::Result<()> {
        self.write("next-node", number.to_string().as_bytes())
    }

    /// What the kernel agreed to when the mount was made; None before.
    pub fn negotiated(&self) -> Option<Negotiated> {
        serde_json::from_slice(&fs::read(self.path.join("negotiated")).ok()?).ok()
    }

    pub fn save_negotiated(&self, with: &Negotiated) -> io::Result<()> {
        self.write("negotiated", &serde_json::to_vec(with)?)
    }

    /// In place of what was there, whole or not at all.
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let _one = self.changing.lock();
        let draft = self.path.join("draft");
        fs::write(&draft, bytes)?;
        fs::rename(&draft, self.path.join(name))
    }
}

fn read(path: &Path) -> Option<Saved> {
    let found = fs::read(path).map(|bytes| serde_json::from_slice(&bytes));
    match found {
        Ok(Ok(saved)) => return Some(saved),
        Ok(Err(error)) => log::line(format_args!("{} cannot be read: {error}", path.display())),
        Err(error) => log::line(format_args!("{} cannot be read: {error}", path.display())),
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open::Kind;

    fn saved(node: u64) -> Saved {
        Saved {
            spec: Spec {
                blocks: 3,
                layers: Vec::new(),
                kind: Kind::Memory,
            },
            node,
            holders: BTreeSet::from(["a".into()]),
            mode: Mode::Passed(4),
            opens: 2,
        }
    }

    #[test]
    fn what_was_saved_is_found_and_what_is_no_stack_is_not() {
        let place = tempfile::tempdir().expect("a folder");
        let folder = Folder::open(place.path().join("state")).expect("a folder");
        assert_eq!(folder.next_node(), FIRST_NODE);
        folder.set_next_node(99).expect("a file");
        folder.save("one", &saved(7)).expect("a file");
        folder.save("two", &saved(8)).expect("a file");
        folder.forget("two");
        fs::write(place.path().join("state/bad.stack"), "{").expect("a file");
        let found = folder.stacks();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].node, found[0].opens), (7, 2));
        assert_eq!(found[0].mode, Mode::Passed(4));
        folder.clear();
        assert!(folder.stacks().is_empty());
        assert_eq!(folder.next_node(), 99);
    }
}
