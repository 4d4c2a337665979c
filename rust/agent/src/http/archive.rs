//! `GET|POST /archive`: a tree of files as a tar stream, out of the sandbox and into it. Ours, not
//! E2B's: an image may have no tar.

use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use bytes::{Buf, Bytes};
use http_body_util::BodyExt;
use hyper::body::{Frame, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::{Request, Response, StatusCode};
use serde_json::json;
use tokio::sync::{mpsc, Semaphore, SemaphorePermit};
use tokio::time::timeout;

use super::connect::channel_body;
use super::upload::{bad, explain, silent, user, Failure, SILENCE};
use super::{download, error, json_answer, query, settle, Answer};
use crate::fs::{pack::pack, resolve, unpack::unpack};
use crate::state::Agent;
use crate::users::User;

/// Pieces on their way, either way.
pub const QUEUE: usize = 4;
pub const CHUNK: usize = 64 << 10;

/// The tree at `path`, its entries below the path's last name.
pub async fn get(agent: &Agent, request: &Request<Incoming>) -> Answer {
    let path = match wanted(agent, request) {
        Ok((_, path)) => path,
        Err((status, message)) => return error(status, &message),
    };
    if path == Path::new("/") {
        return error(
            StatusCode::BAD_REQUEST,
            "the root is not packed: name a folder in it",
        );
    }
    if let Err(failure) = std::fs::symlink_metadata(&path) {
        return download::explain(&path.to_string_lossy(), &failure);
    }
    let (sender, receiver) = mpsc::channel(QUEUE);
    let permit = permit().await;
    tokio::task::spawn_blocking(move || {
        let _permit = permit;
        let out = Out(sender.clone());
        if let Err(failure) = pack(&path, BufWriter::with_capacity(CHUNK, out)) {
            let _ = sender.blocking_send(Err(failure)); // cuts the stream: it is not whole
        }
    });
    let mut answer = Response::new(channel_body(receiver));
    answer
        .headers_mut()
        .insert(CONTENT_TYPE, "application/x-tar".parse().expect("static"));
    answer
}

/// Unpack below the folder `path`, which is made. Owners are the archive's, or `username`.
pub async fn post(agent: &Agent, mut request: Request<Incoming>) -> Answer {
    let answer = match receive(agent, &mut request).await {
        Ok(entries) => json_answer(StatusCode::OK, &json!({"entries": entries})),
        Err((status, message)) => error(status, &message),
    };
    settle(request, answer).await
}

async fn receive(agent: &Agent, request: &mut Request<Incoming>) -> Result<u64, Failure> {
    let (maker, folder) = wanted(agent, request)?;
    let is_named = query(request, "username").is_some();
    let owner = is_named.then_some((maker.uid, maker.gid));
    let (sender, receiver) = mpsc::channel(QUEUE);
    let below = folder.clone();
    let permit = permit().await;
    let unpacked = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        unpack(&below, &maker, owner, In::new(receiver))
    });
    let body = request.body_mut();
    while let Some(frame) = timeout(SILENCE, body.frame()).await.map_err(|_| silent())? {
        let piece = frame.map_err(|failure| io::Error::other(failure.to_string()));
        let piece = piece.map(|frame| frame.into_data().unwrap_or_default());
        let failed = piece.is_err();
        if sender.send(piece).await.is_err() || failed {
            break; // the reason is the unpacker's
        }
    }
    drop(sender);
    unpacked
        .await
        .map_err(|failure| (StatusCode::INTERNAL_SERVER_ERROR, failure.to_string()))?
        .map_err(|failure| match failure.kind() {
            io::ErrorKind::Other | io::ErrorKind::UnexpectedEof => {
                bad(format!("the archive cannot be unpacked: {failure}"))
            }
            _ => explain(&folder, &failure),
        })
}

/// Whose request it is, and the absolute path that it names.
fn wanted(agent: &Agent, request: &Request<Incoming>) -> Result<(User, PathBuf), Failure> {
    let user = user(agent, query(request, "username").as_deref())?;
    let given = query(request, "path").filter(|path| !path.is_empty());
    let given = given.ok_or_else(|| bad("the path query parameter is missing".to_owned()))?;
    let path = resolve(agent, &user, &given).map_err(bad)?;
    Ok((user, PathBuf::from(path)))
}

/// An archive holds a thread as long as its client likes; there must be others left.
pub async fn permit() -> Option<SemaphorePermit<'static>> {
    static ROOM: Semaphore = Semaphore::const_new(32);
    ROOM.acquire().await.ok() // never closed
}

/// What is written goes to the client.
pub struct Out(pub mpsc::Sender<io::Result<Frame<Bytes>>>);

impl Write for Out {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let frame = Frame::data(Bytes::copy_from_slice(data));
        let sent = self.0.blocking_send(Ok(frame));
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the client sends can be read.
struct In {
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    rest: Bytes,
}

impl In {
    fn new(pieces: mpsc::Receiver<io::Result<Bytes>>) -> Self {
        let rest = Bytes::new();
        Self { pieces, rest }
    }
}

impl Read for In {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() {
            match self.pieces.blocking_recv() {
                Some(piece) => self.rest = piece?,
                None => return Ok(0),
            }
        }
        let length = buffer.len().min(self.rest.len());
        self.rest.copy_to_slice(&mut buffer[..length]);
        Ok(length)
    }
}
