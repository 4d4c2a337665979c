//! The control socket: newline-delimited JSON, one request and one reply a line.
//!
//! `{"id":N,"op":"...","args":{...}}` -> `{"id":N,"ok":...}` or
//! `{"id":N,"error":{"code":"...","message":"..."}}`. Clients come and go; state stays.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::Deserialize;
use serde_json::{json, Value};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;

use crate::dns::{Resolvers, SlotSpec};
use crate::forward::Edge;
use crate::log;
use crate::route::SandboxId;
use crate::table::RouteSpec;

const PROTOCOL: u32 = 1;
/// A full sync of 100,000 routes fits in.
const MAX_LINE: u64 = 64 * 1024 * 1024;

/// What the operations act on.
#[derive(Clone)]
pub struct Control {
    pub edge: Arc<Edge>,
    pub resolvers: Arc<Resolvers>,
    pub draining: CancellationToken,
}

#[derive(Deserialize)]
struct Request {
    id: Value,
    op: String,
    #[serde(default)]
    args: Value,
}

/// A refused operation.
#[derive(Debug)]
struct Refusal {
    code: &'static str,
    message: String,
}

impl Refusal {
    fn new(code: &'static str, message: impl ToString) -> Self {
        let message = message.to_string();
        Self { code, message }
    }

    fn json(&self) -> Value {
        json!({"code": self.code, "message": self.message})
    }
}

/// The socket's place in the file system, which is given up at most once and only if still ours.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    inode: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        let still_ours = std::fs::metadata(&self.path).is_ok_and(|m| m.ino() == self.inode);
        if still_ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Binds the control socket, mode 0600; refuses if another edge answers there.
pub fn bind(path: &Path) -> io::Result<(UnixListener, Place)> {
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        let why = format!("another edge serves {}", path.display());
        return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    let inode = std::fs::metadata(path).map(|m| m.ino());
    let place = Place {
        path: path.to_owned(),
        inode: inode?,
    };
    Ok((listener?, place))
}

/// Serves control clients until the drain begins.
pub async fn serve(listener: UnixListener, place: Place, control: Control) {
    let draining = control.draining.clone();
    tokio::select! {
        () = draining.cancelled() => {}
        () = accept_all(&listener, control) => {}
    }
    drop(place);
}

async fn accept_all(listener: &UnixListener, control: Control) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(converse(stream, control.clone()))),
            Err(error) => {
                log::line(format_args!("cannot accept a control client: {error}"));
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
    }
}

async fn converse(stream: UnixStream, control: Control) {
    let (read, mut write) = stream.into_split();
    let mut reader = BufReader::new(read);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader)
            .take(MAX_LINE)
            .read_until(b'\n', &mut line)
            .await
        {
            Ok(_) if line.ends_with(b"\n") => {}
            _ => return, // the client left, or speaks without end
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let mut reply = control.reply(&line).await.to_string();
        reply.push('\n');
        if write.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}

impl Control {
    async fn reply(&self, line: &[u8]) -> Value {
        let request: Request = match serde_json::from_slice(line) {
            Ok(request) => request,
            Err(error) => {
                return json!({"id": null, "error": Refusal::new("bad_request", error).json()})
            }
        };
        match self.act(&request.op, request.args).await {
            Ok(answer) => json!({"id": request.id, "ok": answer}),
            Err(refusal) => json!({"id": request.id, "error": refusal.json()}),
        }
    }

    async fn act(&self, op: &str, args: Value) -> Result<Value, Refusal> {
        match op {
            "hello" => Ok(hello()),
            "sync" => self.sync(parse(args)?).await,
            "put" => self.put(parse(args)?),
            "drop" => self.drop_route(&parse(args)?),
            "dns_up" => self.dns_up(parse(args)?).await,
            "dns_down" => self.dns_down(&parse(args)?).await,
            "stats" => Ok(self.stats()),
            "drain" => {
                self.draining.cancel();
                Ok(json!({}))
            }
            _ => Err(Refusal::new(
                "unknown_op",
                format_args!("no operation {op:?}"),
            )),
        }
    }

    /// Full truth; what cannot be opened is reported and does not hinder the rest.
    async fn sync(&self, truth: Truth) -> Result<Value, Refusal> {
        let routes = self.edge.table.sync(truth.routes).into_iter();
        let routes: Vec<Value> = routes
            .map(|(id, error)| json!({"id": id.as_str(), "message": error.to_string()}))
            .collect();
        let dns = self.resolvers.sync(truth.dns).await.into_iter();
        let dns: Vec<Value> = dns
            .map(|(slot, error)| json!({"slot": slot, "message": error.to_string()}))
            .collect();
        Ok(json!({"failed_routes": routes, "failed_dns": dns}))
    }

    fn put(&self, args: PutArgs) -> Result<Value, Refusal> {
        let netns = args.route.reach.netns.clone();
        let done = self.edge.table.put(args.route);
        done.map_err(|error| cannot_enter(&netns, &error))?;
        Ok(json!({}))
    }

    fn drop_route(&self, args: &DropArgs) -> Result<Value, Refusal> {
        let dropped = self.edge.table.drop_route(&args.id);
        Ok(json!({"dropped": dropped}))
    }

    async fn dns_up(&self, spec: SlotSpec) -> Result<Value, Refusal> {
        let done = self.resolvers.up(spec).await;
        done.map_err(|error| Refusal::new("dns_failed", error))?;
        Ok(json!({}))
    }

    async fn dns_down(&self, args: &SlotArgs) -> Result<Value, Refusal> {
        let dropped = self.resolvers.down(&args.slot).await;
        Ok(json!({"dropped": dropped}))
    }

    fn stats(&self) -> Value {
        let routes = self.edge.table.all();
        let sandboxes: BTreeMap<&str, Value> = routes
            .iter()
            .map(|route| (route.link.id.as_str(), json!(route.link.activity.figures())))
            .collect();
        let totals = json!({
            "sandboxes": sandboxes.len(),
            "connections": self.edge.tasks.len(),
            "dns_queries": self.resolvers.queries(),
            "api": self.edge.api.activity.figures(),
        });
        json!({"sandboxes": sandboxes, "totals": totals})
    }
}

#[derive(Deserialize)]
struct Truth {
    routes: Vec<RouteSpec>,
    dns: Vec<SlotSpec>,
}

#[derive(Deserialize)]
struct PutArgs {
    route: RouteSpec,
}

#[derive(Deserialize)]
struct DropArgs {
    id: SandboxId,
}

#[derive(Deserialize)]
struct SlotArgs {
    slot: String,
}

fn hello() -> Value {
    json!({
        "protocol": PROTOCOL,
        "pid": std::process::id(),
        "version": env!("CARGO_PKG_VERSION"),
    })
}

fn parse<T: DeserializeOwned>(args: Value) -> Result<T, Refusal> {
    serde_json::from_value(args).map_err(|error| Refusal::new("bad_request", error))
}

fn cannot_enter(netns: &Path, error: &io::Error) -> Refusal {
    let message = format!(
        "cannot open the network namespace {}: {error}",
        netns.display()
    );
    Refusal::new("netns_unavailable", message)
}
