//! The control socket of a program of ours: newline-delimited JSON, one request and one reply a line.
//!
//! `{"id":N,"op":"...","args":{...}}` -> `{"id":N,"ok":...}` or
//! `{"id":N,"error":{"code":"...","message":"..."}}`. Clients come and go; state stays.

use std::fmt::Display;
use std::future::Future;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::Deserialize;
use serde_json::{json, Value};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;

/// A full statement of 100,000 things fits in.
const MAX_LINE: u64 = 64 * 1024 * 1024;

/// What a program does for its control clients.
pub trait Control: Clone + Send + Sync + 'static {
    /// Carries out an operation.
    fn act(&self, op: &str, args: Value) -> impl Future<Output = Result<Value, Refusal>> + Send;
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
pub struct Refusal {
    pub code: &'static str,
    pub message: String,
}

impl Refusal {
    pub fn new(code: &'static str, message: impl ToString) -> Self {
        let message = message.to_string();
        Self { code, message }
    }

    pub fn unknown_op(op: &str) -> Self {
        Self::new("unknown_op", format_args!("no operation {op:?}"))
    }

    fn json(&self) -> Value {
        json!({"code": self.code, "message": self.message})
    }
}

/// The arguments of an operation as its type.
pub fn parse<T: DeserializeOwned>(args: Value) -> Result<T, Refusal> {
    serde_json::from_value(args).map_err(|error| Refusal::new("bad_request", error))
}

/// What every program answers to `hello`.
pub fn hello(protocol: u32, version: &str) -> Value {
    json!({"protocol": protocol, "pid": std::process::id(), "version": version})
}

/// A plain line on standard error. Unlike `eprintln!` this does not panic when that is closed.
pub fn log(program: &str, text: impl Display) {
    let _ = writeln!(io::stderr(), "{program}: {text}");
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

/// Binds the control socket, mode 0600; refuses if another program answers there.
pub fn bind(path: &Path) -> io::Result<(UnixListener, Place)> {
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        let why = format!("another program serves {}", path.display());
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
pub async fn serve(
    listener: UnixListener,
    place: Place,
    draining: CancellationToken,
    control: impl Control,
) {
    tokio::select! {
        () = draining.cancelled() => {}
        () = accept_all(&listener, control) => {}
    }
    drop(place);
}

async fn accept_all(listener: &UnixListener, control: impl Control) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(converse(stream, control.clone()))),
            Err(error) => {
                log("control", format_args!("cannot accept a client: {error}"));
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
    }
}

async fn converse(stream: UnixStream, control: impl Control) {
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
        let mut answer = reply(&control, &line).await.to_string();
        answer.push('\n');
        if write.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn reply(control: &impl Control, line: &[u8]) -> Value {
    let request: Request = match serde_json::from_slice(line) {
        Ok(request) => request,
        Err(error) => {
            return json!({"id": null, "error": Refusal::new("bad_request", error).json()})
        }
    };
    match control.act(&request.op, request.args).await {
        Ok(answer) => json!({"id": request.id, "ok": answer}),
        Err(refusal) => json!({"id": request.id, "error": refusal.json()}),
    }
}
