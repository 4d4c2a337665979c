//! WatchDir (a stream) and its polled form: CreateWatcher, GetWatcherEvents, RemoveWatcher.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use hyper::body::Incoming;
use hyper::Request;
use serde::Deserialize;
use serde_json::{json, Value};
use tokio::task::JoinHandle;

use super::connect::{self, Code, Fault, Gone, Pace, Sender};
use super::{auth, Answer};
use crate::fs::resolve;
use crate::fs::watch::{Options, Overflow, Watch};
use crate::state::Agent;

/// Polled watchers of one sandbox; a client that forgets to remove its own must not fill memory.
const MAX_WATCHERS: usize = 1000;

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Message {
    path: String,
    recursive: bool,
    include_entry: bool,
    allow_network_mounts: bool,
    watcher_id: String,
}

/// Polled watchers by id.
#[derive(Default)]
pub struct Table(Mutex<HashMap<String, Polled>>);

struct Polled {
    watch: Arc<Watch>,
    /// Reads the kernel's queue while nobody asks.
    reader: JoinHandle<()>,
}

impl Drop for Polled {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

pub async fn call(agent: &Arc<Agent>, method: &str, request: Request<Incoming>) -> Answer {
    if method == "WatchDir" {
        return stream(agent, request).await;
    }
    connect::within(Pace::of(&request), polled(agent, method, request)).await
}

async fn polled(agent: &Agent, method: &str, request: Request<Incoming>) -> Result<Value, Fault> {
    let name = auth::user_name(&request);
    let message: Message = connect::message(request).await?;
    match method {
        "CreateWatcher" => create(agent, name.as_deref(), &message).await,
        "GetWatcherEvents" => {
            let watch = agent.watchers.find(&message.watcher_id)?;
            let events = take(&watch).await.map_err(|Overflow| overflow())?;
            Ok(json!({"events": events}))
        }
        _ => {
            let mut known = agent.watchers.0.lock().expect("no holder panics");
            let removed = known.remove(&message.watcher_id);
            removed.map_or_else(|| Err(unknown(&message.watcher_id)), |_| Ok(json!({})))
        }
    }
}

async fn create(agent: &Agent, user: Option<&str>, message: &Message) -> Result<Value, Fault> {
    let watch = open(agent, user, message).await?;
    let mut known = agent.watchers.0.lock().expect("no holder panics");
    if known.len() >= MAX_WATCHERS {
        let message = format!("there are {MAX_WATCHERS} watchers already; remove some");
        return Err(Fault::new(Code::ResourceExhausted, message));
    }
    // A restarted agent must not give an id that a client still holds.
    let id = format!("{:x}-{:x}", std::process::id(), agent.next_number());
    let reader = tokio::spawn(read(Arc::clone(&watch)));
    known.insert(id.clone(), Polled { watch, reader });
    Ok(json!({"watcherId": id}))
}

async fn read(watch: Arc<Watch>) {
    while watch.changed().await.is_ok() {
        let watch = Arc::clone(&watch);
        let _ = tokio::task::spawn_blocking(move || watch.collect()).await;
    }
}

/// A folder that came may hold many, which are looked for in a thread of its own.
async fn take(watch: &Arc<Watch>) -> Result<Vec<Value>, Overflow> {
    let watch = Arc::clone(watch);
    let taken = tokio::task::spawn_blocking(move || watch.take()).await;
    taken.unwrap_or(Err(Overflow))
}

impl Table {
    fn find(&self, id: &str) -> Result<Arc<Watch>, Fault> {
        let known = self.0.lock().expect("no holder panics");
        let found = known.get(id).map(|polled| Arc::clone(&polled.watch));
        found.ok_or_else(|| unknown(id))
    }
}

fn unknown(id: &str) -> Fault {
    Fault::new(Code::NotFound, format!("watcher {id} not found"))
}

fn overflow() -> Fault {
    let message = "more happened than could be kept: look at the folder, then watch again";
    Fault::new(Code::ResourceExhausted, message)
}

async fn open(agent: &Agent, user: Option<&str>, message: &Message) -> Result<Arc<Watch>, Fault> {
    let user = agent
        .user(user)
        .map_err(|message| Fault::new(Code::Unauthenticated, message))?;
    let path = resolve(agent, &user, &message.path)
        .map_err(|message| Fault::new(Code::InvalidArgument, message))?;
    let options = Options {
        recursive: message.recursive,
        include_entry: message.include_entry,
        allow_network: message.allow_network_mounts,
    };
    // All folders below it are looked for, which may take long.
    let opened = tokio::task::spawn_blocking(move || {
        open_folder(&path, options).map_err(|error| refused(&path, &error))
    });
    opened
        .await
        .unwrap_or_else(|error| Err(Fault::new(Code::Internal, error.to_string())))
}

fn open_folder(path: &str, options: Options) -> io::Result<Arc<Watch>> {
    let path = Path::new(path);
    if !options.allow_network && Watch::is_network(path)? {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Watch::open(path, options).map(Arc::new)
}

fn refused(path: &str, error: &io::Error) -> Fault {
    match error.kind() {
        io::ErrorKind::NotFound => {
            Fault::new(Code::NotFound, format!("path '{path}' does not exist"))
        }
        io::ErrorKind::NotADirectory => {
            let message = format!("path '{path}' is not a directory");
            Fault::new(Code::InvalidArgument, message)
        }
        io::ErrorKind::StorageFull => {
            let message = "the guest has no inotify watches left (fs.inotify.max_user_watches)";
            Fault::new(Code::ResourceExhausted, message)
        }
        _ if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
            let message = "the guest has no inotify instances left (fs.inotify.max_user_instances)";
            Fault::new(Code::ResourceExhausted, message)
        }
        io::ErrorKind::Unsupported => {
            let message = format!("'{path}' is on a network mount, whose changes may not be seen");
            Fault::new(Code::InvalidArgument, message)
        }
        _ => Fault::new(Code::Internal, format!("'{path}': {error}")),
    }
}

async fn stream(agent: &Agent, request: Request<Incoming>) -> Answer {
    let (name, pace) = (auth::user_name(&request), Pace::of(&request));
    let opened = match connect::first_message::<Message>(request).await {
        Ok(message) => open(agent, name.as_deref(), &message).await,
        Err(fault) => Err(fault),
    };
    match opened {
        Ok(watch) => {
            let (sender, answer) = connect::stream();
            tokio::spawn(async move {
                if let Ok(fault) = relay(&sender, &watch, &pace).await {
                    sender.end(Err(fault)).await;
                }
            });
            answer
        }
        Err(fault) => connect::failed_stream(fault),
    }
}

/// Send `start`, then events, until the client leaves or the deadline passes: the fault to end with.
async fn relay(sender: &Sender, watch: &Arc<Watch>, pace: &Pace) -> Result<Fault, Gone> {
    sender.message(&json!({"start": {}})).await?;
    loop {
        tokio::select! {
            biased;
            () = pace.deadline() => {
                return Ok(Fault::new(Code::DeadlineExceeded, "the watch's deadline passed"));
            }
            () = sender.closed() => return Err(Gone),
            changed = watch.changed() => {
                let Ok(()) = changed else { return Ok(overflow()) };
                let Ok(events) = take(watch).await else { return Ok(overflow()) };
                for event in events {
                    sender.message(&json!({"filesystem": event})).await?;
                }
            }
            () = tokio::time::sleep(pace.keepalive) => {
                sender.message(&json!({"keepalive": {}})).await?;
            }
        }
    }
}
