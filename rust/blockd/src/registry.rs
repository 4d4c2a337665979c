//! The stacks that are open, and for whom.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use agentenv_blocks::stack::{self, Stack};
use agentenv_blocks::Id;
use agentenv_fuse::{Connection, Negotiated};
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::cache::file::LayerFile;
use crate::cache::Cache;
use crate::log;
use crate::open::{Kind, OpenStack};
use crate::saved::{Folder, Lost, Saved};

/// Node numbers reserved with one write.
const NODES: u64 = 1024;

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

/// What is known of a stack that an earlier server had open.
pub struct Before {
    pub node: u64,
    pub mode: Mode,
    pub opens: u64,
}

/// An open stack with those it is open for. Without holders it has no name, and lives on while its
/// file is open.
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
    pub folder: Folder,
    pub lost: Lost,
    cache: Arc<Cache>,
    connection: Arc<Connection>,
    state: RwLock<State>,
    pub changes: Arc<watch::Sender<u64>>,
}

impl Registry {
    /// An empty registry over `folder`, which is made if it is not there.
    pub fn new(
        folder: PathBuf,
        cache: Arc<Cache>,
        connection: Arc<Connection>,
    ) -> io::Result<Self> {
        let folder = Folder::open(folder)?;
        let next_node = folder.next_node();
        let state = State {
            next_node,
            reserved: next_node,
            ..State::default()
        };
        Ok(Self {
            folder,
            lost: Lost::default(),
            cache,
            connection,
            state: RwLock::new(state),
            changes: Arc::new(watch::channel(0).0),
        })
    }

    pub fn save_negotiated(&self, with: &Negotiated) {
        if let Err(error) = self.folder.save_negotiated(with) {
            log::line(format_args!(
                "what the kernel agreed to is not saved: {error}"
            ));
        }
    }

    /// The stack of this spec if it is open; `holder` holds it from now on.
    pub fn join(&self, spec: &Spec, id: &Id, holder: &str) -> io::Result<Option<Arc<OpenStack>>> {
        let holders = BTreeSet::from([holder.to_owned()]);
        self.join_with(&mut self.state.write(), spec, id, &holders)
    }

    fn join_with(
        &self,
        state: &mut State,
        spec: &Spec,
        id: &Id,
        holders: &BTreeSet<String>,
    ) -> io::Result<Option<Arc<OpenStack>>> {
        let State {
            by_name, by_node, ..
        } = state;
        let node = by_name.get(&id.to_string());
        let Some(held) = node.and_then(|node| by_node.get_mut(node)) else {
            return Ok(None);
        };
        let (before, kind) = (held.holders.clone(), held.spec.kind);
        held.holders.extend(holders.iter().cloned());
        if spec.kind == Kind::Memory {
            held.spec.kind = Kind::Memory; // an error would hurt whoever asked for this
        }
        if held.holders != before || held.spec.kind != kind {
            self.save(held).inspect_err(|_| {
                held.holders = before;
                held.spec.kind = kind;
            })?;
            held.stack.set_kind(held.spec.kind);
            held.stack.set_held(true);
        }
        Ok(Some(Arc::clone(&held.stack)))
    }

    /// Adds a stack made of these files, or joins one that came meanwhile. The files are released
    /// unless they are the new stack's.
    pub fn add(
        &self,
        spec: &Spec,
        id: Id,
        stack: Stack,
        files: Vec<Arc<LayerFile>>,
        before: Option<Before>,
        holders: BTreeSet<String>,
    ) -> io::Result<Arc<OpenStack>> {
        let mut state = self.state.write();
        let joined = self.join_with(&mut state, spec, &id, &holders);
        let before = match before {
            Some(before) => Ok(before),
            None => self.new_node(&mut state).map(|node| Before {
                node,
                mode: Mode::Undecided,
                opens: 0,
            }),
        };
        let (joined, before) = match (joined, before) {
            (Ok(joined), Ok(before)) => (joined, before),
            (Err(error), _) | (_, Err(error)) => {
                files.iter().for_each(|file| self.cache.release(file));
                return Err(error);
            }
        };
        if let Some(stack) = joined {
            files.iter().for_each(|file| self.cache.release(file));
            return Ok(stack);
        }
        let changes = Arc::clone(&self.changes);
        let node = before.node;
        let stack = Arc::new(OpenStack::new(id, node, spec.kind, stack, files, changes));
        stack.set_held(!holders.is_empty());
        let held = Held {
            stack: Arc::clone(&stack),
            spec: spec.clone(),
            holders,
            opens: before.opens,
            mode: before.mode,
        };
        self.save(&held).inspect_err(|_| {
            stack.files.iter().for_each(|file| self.cache.release(file));
        })?;
        stack.files.iter().for_each(|file| file.pin());
        state.by_name.insert(id.to_string(), node);
        state.by_node.insert(node, held);
        Ok(stack)
    }

    fn new_node(&self, state: &mut State) -> io::Result<u64> {
        if state.next_node >= state.reserved {
            let reserved = state.next_node + NODES;
            self.folder.set_next_node(reserved)?;
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
        let mut names = self.lost.let_go(&gone);
        names.iter().for_each(|name| self.folder.forget(name));
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
            self.save_or_tell(held);
            if held.holders.is_empty() {
                held.stack.set_held(false);
                names.push(held.stack.id.to_string());
                self.drop_if_unused(&mut state, node);
            }
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
        let name = held.stack.id.to_string();
        self.folder.forget(&name);
        state.by_name.remove(&name);
        if let Mode::Passed(backing) = held.mode {
            let _ = self.connection.backing_close(backing);
        }
        for file in &held.stack.files {
            file.unpin();
            self.cache.release(file);
        }
    }

    /// Drops stacks without holders that the kernel knows no more. A server that was killed may have
    /// counted an open whose answer never came.
    pub fn sweep(&self) {
        let state = self.state.read();
        let free = state
            .by_node
            .iter()
            .filter(|(_, held)| held.holders.is_empty());
        let nodes: Vec<u64> = free.map(|(node, _)| *node).collect();
        drop(state);
        for node in nodes {
            if !matches!(self.connection.knows(node), Ok(false)) {
                continue;
            }
            let mut state = self.state.write();
            // Without a name it cannot have been opened since; with a holder again, it may.
            if let Some(held) = state
                .by_node
                .get_mut(&node)
                .filter(|h| h.holders.is_empty())
            {
                held.opens = 0;
                self.drop_if_unused(&mut state, node);
            }
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
        }
        held.opens += 1;
        self.save_or_tell(held); // before the kernel knows: a successor must answer as we do
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
            self.save_or_tell(held);
        }
        self.drop_if_unused(&mut state, node);
    }

    pub fn by_name(&self, name: &str) -> Option<Arc<OpenStack>> {
        let state = self.state.read();
        let held = state.by_node.get(state.by_name.get(name)?)?;
        (!held.holders.is_empty()).then(|| Arc::clone(&held.stack))
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
            opens: held.opens,
        };
        self.folder.save(&held.stack.id.to_string(), &saved)
    }

    fn save_or_tell(&self, held: &Held) {
        if let Err(error) = self.save(held) {
            log::line(format_args!(
                "stack {} is not saved: {error}",
                held.stack.id
            ));
        }
    }
}
