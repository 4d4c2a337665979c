//! The block server of a node: stacks of layers as flat files on a FUSE mount.
//!
//! A process of its own, which outlives the API server; its mount outlives it, so that it can be
//! started again under running sandboxes. In the order in which a read meets them:

mod cache; // what is kept here
mod fetch; // where they come from
mod files; // the mount
mod flight; // chunks on their way
mod open; // an open stack
mod peers; // other nodes
mod wait; // reads of what is not here

mod control; // the control socket
mod log;
mod near; // reads of a store on this machine
mod options;
mod registry; // the open stacks
mod saved; // what a restart must know

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;
use std::sync::Arc;

use agentenv_control::Refusal;
use agentenv_fuse::{Connection, Start};
use tokio::signal::unix::{signal, SignalKind};
use tokio_util::sync::CancellationToken;

use cache::{Bounds, Cache};
use control::Control;
use fetch::Fetcher;
use files::Mount;
use open::Fault;
use options::Options;
use registry::{Before, Registry};
use saved::Saved;

/// So long a restarted server waits for a table that is not here, before it serves and between tries.
const REOPEN: std::time::Duration = std::time::Duration::from_secs(1);
/// Between two looks for stacks that nobody has open any more.
const SWEEP: std::time::Duration = std::time::Duration::from_secs(2);

fn main() -> ExitCode {
    let options = match Options::parse(lexopt::Parser::from_env()) {
        Ok(options) => options,
        Err(error) => {
            log::line(format_args!("{error}\n{}", options::USAGE));
            return ExitCode::from(64);
        }
    };
    match start(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::line(error);
            ExitCode::from(71)
        }
    }
}

fn start(options: Options) -> io::Result<()> {
    raise_file_limit();
    // SAFETY: our parent gave us this descriptor for our own (`--fuse-fd`); nobody else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(options.fuse_fd) };
    let connection = Connection::new(fd);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let bounds = Bounds {
        size: options.cache_size,
        free: options.cache_free,
    };
    let cache = Arc::new(Cache::open(
        options.cache.clone(),
        options.state.join("tables"),
        bounds,
    )?);
    let objects = runtime
        .block_on(agentenv_objects::open(&options.store))
        .map_err(io::Error::other)?;
    let token = options
        .peer_token_file
        .as_ref()
        .map(std::fs::read_to_string)
        .transpose()?;
    let peers = peers::Peers::new(&options.peers, token.clone());
    let fetcher = Fetcher::new(objects, peers, Arc::clone(&cache));
    let state = options.state.clone();
    let registry = Arc::new(Registry::new(
        state,
        Arc::clone(&cache),
        Arc::clone(&connection),
    )?);
    let mount = Arc::new(Mount {
        registry: Arc::clone(&registry),
        fetcher: Arc::clone(&fetcher),
        patience: options.patience,
        runtime: runtime.handle().clone(),
        hits: Arc::default(),
        misses: Arc::default(),
        near: Arc::default(),
    });
    let near = Arc::clone(&mount.near);
    runtime.spawn(near.watch(Arc::clone(&fetcher), options.patience));
    let draining = CancellationToken::new();
    let ops = Control {
        registry: Arc::clone(&registry),
        fetcher,
        cache: Arc::clone(&cache),
        mount: Arc::clone(&mount),
        draining: draining.clone(),
    };
    let begin = if restarted() {
        runtime.block_on(reopen(&ops));
        runtime.spawn(reopen_lost(ops.clone()));
        Start::Adopted(registry.folder.negotiated())
    } else {
        registry.folder.clear();
        Start::Fresh
    };
    runtime.spawn(async move {
        loop {
            tokio::time::sleep(SWEEP).await;
            tokio::task::block_in_place(|| registry.sweep());
        }
    });
    let served = connection.clone();
    let gone = draining.clone();
    std::thread::spawn(move || {
        if let Err(error) = served.serve(mount, options.threads, begin) {
            log::line(format_args!("the mount is not served: {error}"));
        }
        gone.cancel();
    });
    runtime.block_on(async {
        if let (Some(address), Some(token)) = (options.peer_listen, token) {
            peers::listen(address, token, cache).await?;
        }
        run(&options.control, ops, draining).await
    })?;
    // Not shut down: that would answer the reads that wait, which are a successor's.
    std::mem::forget(runtime);
    Ok(())
}

/// Whether an earlier process of ours served this mount: our supervisor counts.
fn restarted() -> bool {
    let count = std::env::var("AENV_RESTARTS").ok();
    count
        .and_then(|text| text.parse::<u64>().ok())
        .is_some_and(|count| count > 0)
}

async fn run(path: &std::path::Path, ops: Control, draining: CancellationToken) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (listener, place) = agentenv_control::bind(path)?;
    tokio::spawn(agentenv_control::serve(
        listener,
        place,
        draining.clone(),
        ops,
    ));
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = draining.cancelled() => {}
    }
    draining.cancel();
    Ok(())
}

/// Opens what our predecessor had open. Tables of open layers are here; what lacks one, or has it
/// damaged, holds up nobody else, and is tried again until the store has it.
async fn reopen(ops: &Control) {
    for saved in ops.registry.folder.stacks() {
        let opened = tokio::time::timeout(REOPEN, open_again(ops, &saved)).await;
        let cause = match opened {
            Ok(Ok(())) => continue,
            Ok(Err(refusal)) => refusal.message,
            Err(_) => "the store does not answer".into(),
        };
        log::line(format_args!("a stack cannot be opened again: {cause}"));
        let fault = Fault::new(cause.into(), false);
        ops.registry.lost.add(saved, fault);
    }
}

async fn open_again(ops: &Control, saved: &Saved) -> Result<(), Refusal> {
    let before = Before {
        node: saved.node,
        mode: saved.mode,
        opens: saved.opens,
    };
    let (spec, holders) = (&saved.spec, saved.holders.clone());
    let (registry, fetcher, cache) = (&ops.registry, &ops.fetcher, &ops.cache);
    control::open(registry, fetcher, cache, spec, Some(before), holders).await?;
    Ok(())
}

async fn reopen_lost(ops: Control) {
    loop {
        let lost = ops.registry.lost.all();
        if lost.is_empty() {
            return;
        }
        for (saved, _) in lost {
            if open_again(&ops, &saved).await.is_ok() {
                ops.registry.lost.remove(saved.node);
                ops.registry.changes.send_modify(|version| *version += 1);
            }
        }
        tokio::time::sleep(REOPEN).await;
    }
}

/// As many descriptors as we may have: each open layer takes one.
fn raise_file_limit() {
    use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: maximum,
            maximum,
        },
    );
}
