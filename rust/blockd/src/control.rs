//! The operations on the control socket (the protocol's version is in `hello`).

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use agentenv_blocks::stack::Stack;
use agentenv_control::{hello, parse, Refusal};
use serde::Deserialize;
use serde_json::{json, Value};
use tokio::task::block_in_place;
use tokio_util::sync::CancellationToken;

use crate::cache::Cache;
use crate::fetch::Fetcher;
use crate::files::Mount;
use crate::flight::Urgency;
use crate::open::OpenStack;
use crate::registry::{Before, Registry, Spec};

const PROTOCOL: u32 = 1;

#[derive(Clone)]
pub struct Control {
    pub registry: Arc<Registry>,
    pub fetcher: Arc<Fetcher>,
    pub cache: Arc<Cache>,
    pub mount: Arc<Mount>,
    pub draining: CancellationToken,
}

#[derive(Deserialize)]
struct Open {
    holder: String,
    stack: Spec,
}

#[derive(Deserialize)]
struct Holder {
    holder: String,
}

#[derive(Deserialize)]
struct Holders {
    holders: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Prefetch {
    stack: String,
    chunks: Vec<(u32, u32)>,
}

#[derive(Deserialize)]
struct Name {
    stack: String,
}

#[derive(Deserialize)]
struct Since {
    version: u64,
    /// Seconds to wait for a change.
    timeout: f64,
}

impl agentenv_control::Control for Control {
    async fn act(&self, op: &str, args: Value) -> Result<Value, Refusal> {
        match op {
            "hello" => Ok(hello(PROTOCOL, env!("CARGO_PKG_VERSION"))),
            "open" => self.open(parse(args)?).await,
            "close" => self.close(&parse(args)?),
            "keep_only" => self.keep_only(&parse(args)?),
            "prefetch" => self.prefetch(parse(args)?),
            "first_use" => self.first_use(&parse(args)?),
            "faults" => self.faults(parse(args)?).await,
            "stats" => Ok(self.stats()),
            "rescan" => self.rescan(),
            "drain" => {
                self.draining.cancel();
                Ok(json!({}))
            }
            _ => Err(Refusal::unknown_op(op)),
        }
    }
}

impl Control {
    /// Opens a stack for a holder; its name in the mount.
    async fn open(&self, args: Open) -> Result<Value, Refusal> {
        let holders = BTreeSet::from([args.holder]);
        let opened = open(
            &self.registry,
            &self.fetcher,
            &self.cache,
            &args.stack,
            None,
            holders,
        );
        let stack = opened.await?;
        Ok(json!({"name": stack.id.to_string(), "bytes": stack.size()}))
    }

    fn close(&self, args: &Holder) -> Result<Value, Refusal> {
        self.registry.close(&args.holder);
        Ok(json!({}))
    }

    fn keep_only(&self, args: &Holders) -> Result<Value, Refusal> {
        self.registry.keep_only(&args.holders);
        Ok(json!({}))
    }

    fn find(&self, name: &str) -> Result<Arc<OpenStack>, Refusal> {
        let found = self.registry.by_name(name);
        found.ok_or_else(|| Refusal::new("not_open", format_args!("no stack {name} is open")))
    }

    fn prefetch(&self, args: Prefetch) -> Result<Value, Refusal> {
        let stack = self.find(&args.stack)?;
        for part in args.chunks.chunk_by(|a, b| a.0 == b.0) {
            let Some(file) = stack.files.get(part[0].0 as usize) else {
                continue;
            };
            let count = file.layer().chunk_count();
            let wanted = part.iter().map(|(_, chunk)| *chunk);
            let wanted: Vec<u32> = wanted.filter(|c| *c < count && !file.has(*c)).collect();
            drop(self.fetcher.request(file, wanted, Urgency::Ahead));
        }
        Ok(json!({}))
    }

    fn first_use(&self, args: &Name) -> Result<Value, Refusal> {
        Ok(json!({"chunks": self.find(&args.stack)?.first_use()}))
    }

    /// What holds stacks up, as soon as that is another story than in `version`.
    async fn faults(&self, args: Since) -> Result<Value, Refusal> {
        let mut changes = self.registry.changes.subscribe();
        let timeout = Duration::try_from_secs_f64(args.timeout).unwrap_or(Duration::ZERO);
        let other = changes.wait_for(|version| *version != args.version);
        let _ = tokio::time::timeout(timeout.min(Duration::from_secs(3600)), other).await;
        let version = *self.registry.changes.borrow();
        let mut faults = Vec::new();
        for (stack, holders, _) in self.registry.all() {
            if let Some(fault) = stack.fault.lock().clone() {
                let name = stack.id.to_string();
                faults.push(json!({"stack": name, "holders": holders, "fault": fault}));
            }
        }
        for (saved, fault) in self.registry.lost.all() {
            let name = saved.spec.ids().map(|(_, id)| id.to_string());
            let name = name.unwrap_or_default();
            faults.push(json!({"stack": name, "holders": saved.holders, "fault": fault}));
        }
        Ok(json!({"version": version, "faults": faults}))
    }

    fn rescan(&self) -> Result<Value, Refusal> {
        let done = block_in_place(|| self.cache.rescan(false));
        done.map_err(|error| Refusal::new("cache_failed", error))?;
        Ok(json!({}))
    }

    fn stats(&self) -> Value {
        let all = self.registry.all();
        let passed = all.iter().filter(|(.., passed)| *passed).count();
        json!({
            "stacks": all.len(),
            "passthrough": passed,
            "open_layers": self.cache.open_layers(),
            "cache_bytes": self.cache.bytes(),
            "cache_hits": self.mount.hits.load(Ordering::Relaxed),
            "cache_misses": self.mount.misses.load(Ordering::Relaxed),
            "under_way": self.fetcher.flights.count(),
            "fetch": self.fetcher.counters,
            "eviction": self.cache.counters,
        })
    }
}

/// Opens a stack, its tables fetched if they are not here. Nothing is left of a failure.
pub async fn open(
    registry: &Registry,
    fetcher: &Fetcher,
    cache: &Cache,
    spec: &Spec,
    before: Option<Before>,
    holders: BTreeSet<String>,
) -> Result<Arc<OpenStack>, Refusal> {
    let (layers, id) = spec
        .ids()
        .map_err(|fault| Refusal::new("bad_request", fault))?;
    let failed = |error: std::io::Error| Refusal::new("cache_failed", error);
    if let [holder] = &holders.iter().collect::<Vec<_>>()[..] {
        if let Some(stack) = registry.join(spec, &id, holder).map_err(failed)? {
            return Ok(stack);
        }
    }
    let mut files = Vec::new();
    let made = async {
        for (layer, _) in &layers {
            let file = match cache.join(layer) {
                Some(file) => file,
                None => {
                    let table = fetcher.layer(*layer).await.map_err(|error| {
                        Refusal::new(error.code(), format_args!("layer {layer}: {error}"))
                    })?;
                    block_in_place(|| cache.acquire(table)).map_err(failed)?
                }
            };
            files.push(file);
        }
        let parts = files
            .iter()
            .zip(&layers)
            .map(|(file, (_, at))| (Arc::clone(file.layer()), *at));
        let stack = block_in_place(|| Stack::new(spec.blocks, parts.collect()));
        let stack = stack.map_err(|fault| Refusal::new("bad_stack", fault))?;
        Ok::<_, Refusal>(stack)
    };
    match made.await {
        Ok(stack) => registry
            .add(spec, id, stack, files, before, holders)
            .map_err(failed),
        Err(refusal) => {
            files.iter().for_each(|file| cache.release(file));
            Err(refusal)
        }
    }
}
