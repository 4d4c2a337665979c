//! The stacks that are open, and for whom. What a restarted server must know again lies in a folder:
//! a file for each stack, what the kernel agreed to, the first node number not yet given out.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agentenv_blocks::stack::{self, Stack};
use agentenv_blocks::Id;
use agentenv_fuse::{Connection, Negotiated};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::cache::file::LayerFile;
use crate::cache::Cache;
use crate::log;
use crate::open::{Kind, OpenStack};

/// Node numbers reserved with one write.
const NODES: u64 = 1024;
const FIRST_NODE: u64 = 2;

/// What a client asks to be opened. Part of the control protocol and of the folder's files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Length in blocks.
    pub blocks: u32,
    /// Layers, lowest first, each with the block it begins at.
    pub layers: Vec<(String, u32)>,
    pub kind: Kind,
}

impl Spec {
    /// The layers' ids, and the stack's own.
    pub fn ids(&self) -> Result<(Vec<(Id, u32)>, Id), agentenv_blocks::Damaged> {
        let layers: Result<Vec<_>, _> = self
            .layers
            .iter()
            .map(|(id, at)| Ok((id.parse::<Id>()?, *at)))
            .collect();
        let layers = layers?;
        let id = stack::id(self.blocks, &layers);
        Ok((layers, id))
    }
}

/// How the kernel reads an open file; the same for all who have it open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    #[default]
    Undecided,
    /// Through us, with its page cache.
    Served,
    /// By itself, from the file behind this backing id.
    Passed(i32),
}

#[derive(Serialize, Deserialize)]
struct Saved {
    spec: Spec,
    node: u64,
    holders: BTreeSet<String>,
    mode: Mode,
}

/// An open stack with those it is open for.
struct Held {
    stack: Arc<OpenStack>,
    spec: Spec,
    holders: BTreeSet<String>,
    opens: u64,
    mode: Mode,
}

#[derive(Default)]
struct State {
    by_name: HashMap<String, u64>,
    by_node: BTreeMap<u64, Held>,
    next_node: u64,
    reserved: u64,
}

pub struct Registry {
    folder: PathBuf,
    cache: Arc<Cache>,
    connection: Arc<Connection>,
    state: RwLock<State>,
    /// One change of the folder at a time.
    saving: Mutex<()>,
    pub changes: Arc<watch::Sender<u64>>,
}

impl Registry {
    /// An empty registry over `folder`, which is made if it is not there.
    pub fn new(
        folder: PathBuf,
        cache: Arc<Cache>,
        connection: Arc<Connection>,
    ) -> io::Result<Self> {
        fs::create_dir_all(&folder)?;
        let text = fs::read_to_string(folder.join("next-node")).unwrap_or_default();
        let next_node = text.trim().parse().unwrap_or(FIRST_NODE);
        let state = State {
            next_node,
            reserved: next_node,
            ..State::default()
        };
        Ok(Self {
            folder,
            cache,
            connection,
            state: RwLock::new(state),
            saving: Mutex::default(),
            changes: Arc::new(watch::channel(0).0),
        })
    }

    /// What the server before us had open, except what cannot be opened without the store.
    pub fn saved(&self) -> Vec<(Spec, u64, BTreeSet<String>, Mode)> {
        let Ok(files) = fs::read_dir(&self.folder) else {
            return Vec::new();
        };
        let paths = files.flatten().map(|file| file.path());
        let saved = paths.filter(|path| path.extension().is_some_and(|kind| kind == "stack"));
        saved
            .filter_map(
                |path| match serde_json::from_slice::<Saved>(&fs::read(&path).ok()?) {
                    Ok(Saved {
                        spec,
                        node,
                        holders,
                        mode,
                    }) => Some((spec, node, holders, mode)),
                    Err(error) => {
                        log::line(format_args!("{} cannot be read: {error}", path.display()));
                        None
                    }
                },
            )
            .collect()
    }

    pub fn forget_saved(&self) {
        for (spec, ..) in self.saved() {
            if let Ok((_, id)) = spec.ids() {
                let _ = fs::remove_file(self.file(&id.to_string()));
            }
        }
        let _ = fs::remove_file(self.folder.join("negotiated"));
    }

    /// What the kernel agreed to when the mount was made; None before.
    pub fn negotiated(&self) -> Option<Negotiated> {
        serde_json::from_slice(&fs::read(self.folder.join("negotiated")).ok()?).ok()
    }

    pub fn save_negotiated(&self, with: &Negotiated) {
        let bytes = serde_json::to_vec(with).unwrap_or_default();
        if let Err(error) = write_whole(&self.folder.join("negotiated"), &bytes) {
            log::line(format_args!(
                "what the kernel agreed to is not saved: {error}"
            ));
        }
    }

    /// The name of a stack of this spec if it is open; `holder` holds it from now on.
    pub fn join(&self, id: &Id, holder: &str) -> io::Result<Option<Arc<OpenStack>>> {
        let mut state = self.state.write();
        let Some(node) = state.by_name.get(&id.to_string()).copied() else {
            return Ok(None);
        };
        let Some(held) = state.by_node.get_mut(&node) else {
            return Ok(None);
        };
        if held.holders.insert(holder.to_owned()) {
            let saved = self.save(held);
            if saved.is_err() {
                held.holders.remove(holder);
            }
            saved?;
        }
        Ok(Some(Arc::clone(&held.stack)))
    }

    /// Adds a stack made of these files, or joins one that came meanwhile.
    pub fn add(
        &self,
        spec: &Spec,
        id: Id,
        stack: Stack,
        files: Vec<Arc<LayerFile>>,
        before: Option<(u64, Mode)>,
        holders: BTreeSet<String>,
    ) -> io::Result<Arc<OpenStack>> {
        let mut state = self.state.write();
        let name = id.to_string();
        let (node, mode) = match before {
            Some(before) => before,
            None => (self.new_node(&mut state)?, Mode::Undecided),
        };
        if let Some(held) = state
            .by_name
            .get(&name)
            .copied()
            .and_then(|n| state.by_node.get_mut(&n))
        {
            held.holders.extend(holders);
            self.save(held)?;
            files.iter().for_each(|file| self.cache.release(file));
            return Ok(Arc::clone(&held.stack));
        }
        let changes = Arc::clone(&self.changes);
        let stack = Arc::new(OpenStack::new(id, node, spec.kind, stack, files, changes));
        let spec = spec.clone();
        let held = Held {
            stack: Arc::clone(&stack),
            spec,
            holders,
            opens: 0,
            mode,
        };
        self.save(&held)?;
        stack.files.iter().for_each(|file| file.pin());
        state.by_name.insert(name, node);
        state.by_node.insert(node, held);
        Ok(stack)
    }

    fn new_node(&self, state: &mut State) -> io::Result<u64> {
        if state.next_node >= state.reserved {
            let reserved = state.next_node + NODES;
            write_whole(
                &self.folder.join("next-node"),
                reserved.to_string().as_bytes(),
            )?;
            state.reserved = reserved;
        }
        state.next_node += 1;
        Ok(state.next_node - 1)
    }

    /// Makes `holders` all there are; whoever else held a stack does so no more.
    pub fn keep_only(&self, holders: &BTreeSet<String>) {
        self.let_go(|holder| !holders.contains(holder));
    }

    /// `holder` holds nothing more.
    pub fn close(&self, holder: &str) {
        self.let_go(|name| name == holder);
    }

    fn let_go(&self, gone: impl Fn(&str) -> bool) {
        let mut names = Vec::new();
        let mut state = self.state.write();
        let nodes: Vec<u64> = state.by_node.keys().copied().collect();
        for node in nodes {
            let Some(held) = state.by_node.get_mut(&node) else {
                continue;
            };
            let before = held.holders.len();
            held.holders.retain(|holder| !gone(holder));
            if held.holders.len() == before {
                continue;
            }
            if !held.holders.is_empty() {
                if let Err(error) = self.save(held) {
                    log::line(format_args!(
                        "holders of {} are not saved: {error}",
                        held.stack.id
                    ));
                }
                continue;
            }
            let name = held.stack.id.to_string();
            let _ = fs::remove_file(self.file(&name));
            state.by_name.remove(&name);
            names.push(name);
            self.drop_if_unused(&mut state, node);
        }
        drop(state);
        // Not under our lock: the kernel may hold the folder while it waits for a look-up's answer.
        for name in names {
            let _ = self.connection.forget_name(name.as_bytes());
        }
    }

    fn drop_if_unused(&self, state: &mut State, node: u64) {
        let unused = |held: &Held| held.opens == 0 && held.holders.is_empty();
        if !state.by_node.get(&node).is_some_and(unused) {
            return;
        }
        let Some(held) = state.by_node.remove(&node) else {
            return;
        };
        if let Mode::Passed(backing) = held.mode {
            let _ = self.connection.backing_close(backing);
        }
        for file in &held.stack.files {
            file.unpin();
            self.cache.release(file);
        }
    }

    /// Somebody opens the file of a node; how it is read.
    pub fn opened(&self, node: u64) -> Option<Mode> {
        let passthrough = self
            .connection
            .negotiated()
            .is_some_and(|n| n.passthrough());
        let mut state = self.state.write();
        let held = state.by_node.get_mut(&node)?;
        if held.opens == 0 && held.mode == Mode::Served {
            held.mode = Mode::Undecided;
        }
        if held.mode == Mode::Undecided {
            held.mode = self.decide(&held.stack, passthrough);
            if let Err(error) = self.save(held) {
                log::line(format_args!(
                    "how stack {} is read is not saved: {error}",
                    held.stack.id
                ));
            }
        }
        held.opens += 1;
        Some(held.mode)
    }

    /// A layer that is whole on this disk and fills its stack is left to the kernel.
    fn decide(&self, stack: &OpenStack, passthrough: bool) -> Mode {
        let [file] = &stack.files[..] else {
            return Mode::Served;
        };
        let fills = file.layer().blocks() == stack.stack.blocks();
        let Some(whole) = file.whole().filter(|_| passthrough && fills) else {
            return Mode::Served;
        };
        match self.connection.backing_open(whole) {
            Ok(backing) => Mode::Passed(backing),
            Err(error) => {
                log::line(format_args!(
                    "stack {} is not passed through: {error}",
                    stack.id
                ));
                Mode::Served
            }
        }
    }

    pub fn released(&self, node: u64) {
        let mut state = self.state.write();
        if let Some(held) = state.by_node.get_mut(&node) {
            held.opens = held.opens.saturating_sub(1);
        }
        self.drop_if_unused(&mut state, node);
    }

    pub fn by_name(&self, name: &str) -> Option<Arc<OpenStack>> {
        let state = self.state.read();
        let held = state.by_node.get(state.by_name.get(name)?)?;
        Some(Arc::clone(&held.stack))
    }

    pub fn by_node(&self, node: u64) -> Option<Arc<OpenStack>> {
        Some(Arc::clone(&self.state.read().by_node.get(&node)?.stack))
    }

    /// Every stack with its holders and whether the kernel reads it by itself.
    pub fn all(&self) -> Vec<(Arc<OpenStack>, Vec<String>, bool)> {
        let state = self.state.read();
        let each = state.by_node.values().map(|held| {
            let holders = held.holders.iter().cloned().collect();
            (
                Arc::clone(&held.stack),
                holders,
                matches!(held.mode, Mode::Passed(_)),
            )
        });
        each.collect()
    }

    fn save(&self, held: &Held) -> io::Result<()> {
        let saved = Saved {
            spec: held.spec.clone(),
            node: held.stack.node,
            holders: held.holders.clone(),
            mode: held.mode,
        };
        let _one = self.saving.lock();
        write_whole(
            &self.file(&held.stack.id.to_string()),
            &serde_json::to_vec(&saved)?,
        )
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.stack"))
    }
}

/// In place of what was there, whole or not at all. The folder lives in memory: nothing to sync.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let draft = path.with_extension("new");
    fs::write(&draft, bytes)?;
    fs::rename(&draft, path)
}
