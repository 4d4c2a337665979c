//! The data plane of a node: routes client connections to sandboxes and to the API server.
//!
//! A process of its own, so that restarting the API server cuts no stream. In the order in
//! which a request meets them:

mod activity; // counters
mod admit; // whether it may pass, or wake
mod answer; // what the edge says by itself
mod body; // bodies, streamed at the pace of the slower side
mod client; // the client's stream, and the handle by which others end it
mod cut; // ending what is open on a route that went
mod flight; // one request under way, accounted for
mod forward; // the path of one request
mod headers; // what changes between two hops (pure)
mod http2; // HTTP/2's way of saying things, and ours (pure)
mod listen; // public listeners, one task for each connection
mod netns; // sockets in a sandbox's network namespace
mod pool; // connections waiting for their next request
mod route; // whom it is for (pure)
mod secret; // tokens
mod sender; // one upstream connection between requests
mod signed; // file URLs that name their sandbox by a signature only (pure)
mod spec; // a route as it is stated (pure)
mod table; // the sandboxes there are
mod tls; // the certificate of the listeners
mod upgrade; // what leaves HTTP: WebSocket
mod upstream; // guests and the API server, asked over pooled connections
mod wake; // requests held for a sandbox that sleeps

mod control; // the control socket
mod dns; // name resolution for guests
mod log;
mod options;

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{signal, SignalKind};
use tokio::sync::Semaphore;
use tokio::time::{interval, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use control::Control;
use dns::Resolvers;
use forward::Edge;
use listen::Door;
use options::Options;
use table::{Table, Way};
use tls::Tls;
use upstream::Api;
use wake::Wakes;

/// How often pools are looked through for connections that nobody will use again, and TLS files
/// for a change.
const SWEEP: Duration = Duration::from_secs(15);
/// Descriptors kept for listeners, control, namespaces and name resolution.
const RESERVED: u64 = 1024;

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
    netns::remember_home()?;
    let files = raise_file_limit()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(run(options, files))
}

/// As many descriptors as we may have; answers how many that is.
fn raise_file_limit() -> io::Result<u64> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    setrlimit(Resource::Nofile, raised)?;
    Ok(maximum.unwrap_or(1 << 20))
}

async fn run(options: Options, files: u64) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let tls = options
        .tls
        .clone()
        .map(Tls::load)
        .transpose()?
        .map(Arc::new);
    let listeners = bind(&options)?;
    let (control, place) = agentenv_control::bind(&options.control)?;
    announce(&listeners)?;
    let draining = CancellationToken::new();
    let edge = Arc::new(Edge {
        table: Arc::new(Table::default()),
        api: Arc::new(Api::new(options.api.clone(), options.api_wait)),
        wakes: Wakes::new(options.wake_wait, draining.clone()),
        tasks: TaskTracker::new(),
    });
    let resolvers = Arc::new(Resolvers::default());
    let ops = Control {
        edge: Arc::clone(&edge),
        resolvers: Arc::clone(&resolvers),
        draining: draining.clone(),
    };
    tokio::spawn(agentenv_control::serve(
        control,
        place,
        draining.clone(),
        ops,
    ));
    tokio::spawn(sweep(Arc::clone(&edge), tls.clone()));
    let door = Door {
        edge: Arc::clone(&edge),
        tls,
        room: Arc::new(Semaphore::new(room(files))),
        draining: draining.clone(),
    };
    for listener in listeners {
        tokio::spawn(listen::accept(listener, door.clone()));
    }
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = draining.cancelled() => {}
    }
    draining.cancel();
    resolvers.sync(Vec::new()).await; // a successor needs the addresses at once
    drain(&edge, options.drain).await;
    Ok(())
}

fn bind(options: &Options) -> io::Result<Vec<TcpListener>> {
    let bound = options.listen.iter().map(|address| {
        let why = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot listen on {address}: {error}"))
        };
        listen::bind(*address).map_err(why)
    });
    bound.collect()
}

/// The one line on standard output: where clients can connect, port 0 resolved.
fn announce(listeners: &[TcpListener]) -> io::Result<()> {
    let bound: io::Result<Vec<String>> = listeners
        .iter()
        .map(|listener| Ok(listener.local_addr()?.to_string()))
        .collect();
    let line = json!({"listen": bound?, "pid": std::process::id()});
    writeln!(io::stdout(), "{line}")
}

/// How many clients may be connected at once: each may need an upstream connection, too.
fn room(files: u64) -> usize {
    let connections = files.saturating_sub(RESERVED).max(RESERVED) / 2;
    let connections = usize::try_from(connections).unwrap_or(Semaphore::MAX_PERMITS);
    connections.min(Semaphore::MAX_PERMITS)
}

async fn sweep(edge: Arc<Edge>, tls: Option<Arc<Tls>>) {
    let mut ticks = interval(SWEEP);
    loop {
        ticks.tick().await;
        if let Some(tls) = &tls {
            tls.renew();
        }
        edge.api.pool.sweep();
        for route in edge.table.all() {
            if let Way::Open(link) = &route.way {
                link.pool.sweep();
            }
        }
    }
}

async fn drain(edge: &Edge, deadline: Duration) {
    edge.tasks.close();
    if timeout(deadline, edge.tasks.wait()).await.is_err() {
        let open = edge.tasks.len();
        log::line(format_args!(
            "{open} connections cut at the end of the drain"
        ));
    }
}
