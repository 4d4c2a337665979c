//! The mount: each open stack is a file.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use agentenv_blocks::BLOCK;
use agentenv_fuse::{Attr, Errno, Files, Negotiated, Opened, ReadReply};
use tokio::runtime::Handle;

use crate::cache::file::{buffer, Buffer};
use crate::fetch::Fetcher;
use crate::near::Near;
use crate::open::OpenStack;
use crate::registry::{Mode, Registry};
use crate::wait::{self, Range};

/// Implements `Files`.
pub struct Mount {
    pub registry: Arc<Registry>,
    pub fetcher: Arc<Fetcher>,
    pub patience: Duration,
    pub runtime: Handle,
    /// Reads answered from this machine, and those that waited.
    pub hits: Arc<AtomicU64>,
    pub misses: Arc<AtomicU64>,
    pub near: Arc<Near>,
}

thread_local! {
    static BYTES: RefCell<Buffer> = RefCell::new(buffer(1 << 20));
}

impl Mount {
    fn attr_of(stack: &OpenStack) -> Attr {
        let (node, size) = (stack.node, stack.size());
        Attr { node, size }
    }

    /// Answers from what is here; gives the reply back if something is missing.
    fn at_once(stack: &OpenStack, range: Range, reply: ReadReply) -> Option<ReadReply> {
        let (first, count, skip) = range.blocks();
        BYTES.with_borrow_mut(|bytes| {
            let length = count as usize * BLOCK;
            if bytes.len() < length {
                *bytes = buffer(length);
            }
            if stack.read_now(first, &mut bytes[..length]) {
                reply.data(&bytes[skip..skip + range.size as usize]);
                return None;
            }
            Some(reply)
        })
    }
}

impl Files for Mount {
    fn lookup(&self, name: &[u8]) -> Option<Attr> {
        let name = std::str::from_utf8(name).ok()?;
        self.registry
            .by_name(name)
            .map(|stack| Self::attr_of(&stack))
    }

    fn attr(&self, node: u64) -> Option<Attr> {
        if let Some(stack) = self.registry.by_node(node) {
            return Some(Self::attr_of(&stack));
        }
        // In this order: one that was opened again meanwhile is lost no more.
        let lost = self.registry.lost.blocks(node).map(|blocks| Attr {
            node,
            size: u64::from(blocks) * BLOCK as u64,
        });
        let found = || {
            self.registry
                .by_node(node)
                .map(|stack| Self::attr_of(&stack))
        };
        lost.or_else(found)
    }

    fn list(&self) -> Vec<(Vec<u8>, Attr)> {
        let all = self.registry.all().into_iter();
        all.filter(|(_, holders, _)| !holders.is_empty())
            .map(|(stack, ..)| (stack.id.to_string().into_bytes(), Self::attr_of(&stack)))
            .collect()
    }

    fn open(&self, node: u64) -> Result<Opened, Errno> {
        match self.registry.opened(node) {
            None => Err(Errno::STALE),
            Some(Mode::Passed(backing)) => Ok(Opened {
                passthrough: Some(backing),
            }),
            Some(_) => Ok(Opened { passthrough: None }),
        }
    }

    fn release(&self, node: u64) {
        self.registry.released(node);
    }

    fn read(&self, node: u64, offset: u64, size: u32, reply: ReadReply) {
        let range = Range { offset, size };
        let Some(stack) = self.registry.by_node(node) else {
            let (registry, fetcher) = (Arc::clone(&self.registry), Arc::clone(&self.fetcher));
            let lost = wait::read_lost(registry, node, fetcher, range, self.patience, reply);
            self.runtime.spawn(lost);
            return;
        };
        let Some(reply) = Self::at_once(&stack, range, reply) else {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return;
        };
        self.misses.fetch_add(1, Ordering::Relaxed);
        let _spawns = self.runtime.enter();
        let Some(reply) = self.near.read(&stack, &self.fetcher, range, reply) else {
            return;
        };
        let fetcher = Arc::clone(&self.fetcher);
        self.runtime
            .spawn(wait::read(stack, fetcher, range, self.patience, reply));
    }

    fn negotiated(&self, with: &Negotiated) {
        self.registry.save_negotiated(with);
    }
}
