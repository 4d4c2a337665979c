//! `POST /files`: one raw file or several in a form, streamed to disk.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use flate2::write::GzDecoder;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE};
use hyper::{Request, StatusCode};
use serde_json::{json, Value};
use tokio::sync::mpsc;

use super::{error, json_answer, query, Answer};
use crate::fs::metadata::{self, Metadata};
use crate::fs::{operations, resolve};
use crate::state::Agent;
use crate::sys;
use crate::users::User;

/// Pieces received ahead of the disk.
const QUEUE: usize = 4;

/// What holds for all files of one upload.
#[derive(Clone)]
struct How {
    user: User,
    gzip: bool,
    metadata: Metadata,
}

/// A failed upload: status and message.
type Failure = (StatusCode, String);

pub async fn post(agent: &Agent, request: Request<Incoming>) -> Answer {
    match receive(agent, request).await {
        Ok(written) => json_answer(StatusCode::OK, &json!(written)),
        Err((status, message)) => error(status, &message),
    }
}

async fn receive(agent: &Agent, request: Request<Incoming>) -> Result<Vec<Value>, Failure> {
    let user = agent
        .user(query(&request, "username").as_deref())
        .map_err(|message| (StatusCode::UNAUTHORIZED, message))?;
    let path = query(&request, "path").filter(|path| !path.is_empty());
    let header = |name| {
        request
            .headers()
            .get(name)
            .and_then(|value| value.to_str().ok())
    };
    let kind = header(CONTENT_TYPE).unwrap_or_default().to_owned();
    let gzip = match header(CONTENT_ENCODING).unwrap_or("identity") {
        "identity" | "" => false,
        "gzip" => true,
        other => return Err(bad(format!("Content-Encoding {other} is not supported"))),
    };
    let how = How {
        user,
        gzip,
        metadata: noted(&request)?,
    };
    if let Ok(boundary) = multer::parse_boundary(&kind) {
        return receive_form(agent, &how, path, boundary, request.into_body()).await;
    }
    let path = path.ok_or_else(|| bad("the path query parameter is missing".to_owned()))?;
    let mut target = Target::open(agent, &how, &path).await?;
    let mut body = request.into_body();
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => target.write(frame.into_data().unwrap_or_default()).await?,
            Err(_) => return Err(target.abandon(broken_off()).await),
        }
    }
    Ok(vec![target.finish().await?])
}

/// The `X-Metadata-<key>` headers.
fn noted(request: &Request<Incoming>) -> Result<Metadata, Failure> {
    let mut found = Metadata::new();
    for (name, value) in request.headers() {
        if let Some(key) = name.as_str().strip_prefix("x-metadata-") {
            let value = String::from_utf8_lossy(value.as_bytes());
            metadata::add(&mut found, key, &value).map_err(bad)?;
        }
    }
    Ok(found)
}

/// Each part named `file`; its file name is the whole target path, unless the query gives one.
async fn receive_form(
    agent: &Agent,
    how: &How,
    path: Option<String>,
    boundary: String,
    body: Incoming,
) -> Result<Vec<Value>, Failure> {
    let malformed = |failure: multer::Error| bad(format!("malformed form: {failure}"));
    let mut form = multer::Multipart::new(body.into_data_stream(), boundary);
    let mut written = Vec::new();
    while let Some(mut part) = form.next_field().await.map_err(malformed)? {
        if part.name() != Some("file") {
            continue;
        }
        let name = path.clone().or_else(|| part.file_name().map(str::to_owned));
        let name = name.ok_or_else(|| bad("a part has neither path nor file name".to_owned()))?;
        let mut target = Target::open(agent, how, &name).await?;
        loop {
            match part.chunk().await {
                Ok(Some(data)) => target.write(data).await?,
                Ok(None) => break,
                Err(failure) => return Err(target.abandon(malformed(failure)).await),
            }
        }
        written.push(target.finish().await?);
    }
    if written.is_empty() {
        return Err(bad("the form holds no part named 'file'".to_owned()));
    }
    Ok(written)
}

fn bad(message: String) -> Failure {
    (StatusCode::BAD_REQUEST, message)
}

fn broken_off() -> Failure {
    bad("the upload broke off".to_owned())
}

fn explain(path: &Path, failure: &io::Error) -> Failure {
    let path = path.display();
    if failure.raw_os_error() == Some(libc::ENXIO) {
        return bad(format!("'{path}': not a regular file")); // a pipe that nobody reads
    }
    match failure.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => (
            StatusCode::INSUFFICIENT_STORAGE,
            "not enough disk space".to_owned(),
        ),
        io::ErrorKind::IsADirectory => bad(format!("path '{path}' is a directory")),
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
            bad(format!("the gzip data for '{path}' are damaged"))
        }
        io::ErrorKind::NotADirectory
        | io::ErrorKind::InvalidFilename
        | io::ErrorKind::NotFound
        | io::ErrorKind::AlreadyExists
        | io::ErrorKind::PermissionDenied
        | io::ErrorKind::ReadOnlyFilesystem
        | io::ErrorKind::InvalidInput => bad(format!("'{path}': {failure}")),
        _ => (
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("'{path}': {failure}"),
        ),
    }
}

/// A file being written by a thread of its own, so that a slow disk does not stop the agent.
struct Target {
    path: PathBuf,
    pieces: Option<mpsc::Sender<Bytes>>,
    writer: tokio::task::JoinHandle<io::Result<()>>,
    is_new: bool,
}

impl Target {
    async fn open(agent: &Agent, how: &How, given: &str) -> Result<Self, Failure> {
        let path = PathBuf::from(resolve(agent, &how.user, given).map_err(bad)?);
        let (opening, how, gzip) = (path.clone(), how.clone(), how.gzip);
        let opened = tokio::task::spawn_blocking(move || create(&opening, &how)).await;
        let (file, is_new) = opened
            .map_err(|failure| (StatusCode::INTERNAL_SERVER_ERROR, failure.to_string()))?
            .map_err(|failure| explain(&path, &failure))?;
        let (pieces, mut incoming) = mpsc::channel::<Bytes>(QUEUE);
        let writer = tokio::task::spawn_blocking(move || {
            let mut sink = Sink::new(file, gzip);
            while let Some(piece) = incoming.blocking_recv() {
                sink.write(&piece)?;
            }
            sink.finish()
        });
        Ok(Self {
            path,
            pieces: Some(pieces),
            writer,
            is_new,
        })
    }

    async fn write(&mut self, data: Bytes) -> Result<(), Failure> {
        let pieces = self.pieces.as_ref().expect("open until it is finished");
        if data.is_empty() || pieces.send(data).await.is_ok() {
            return Ok(());
        }
        // The writer has ended early: its own result says why.
        Err(self.failed().await)
    }

    async fn finish(mut self) -> Result<Value, Failure> {
        self.pieces = None;
        match (&mut self.writer).await {
            Ok(Ok(())) => {
                let name = self.path.file_name().unwrap_or_default().to_string_lossy();
                let path = self.path.to_string_lossy();
                let mut written = json!({"name": name, "type": "file", "path": path});
                let noted = metadata::read(&self.path);
                if !noted.is_empty() {
                    written["metadata"] = json!(noted);
                }
                Ok(written)
            }
            outcome => Err(self.cleaned(outcome)),
        }
    }

    async fn failed(&mut self) -> Failure {
        self.pieces = None;
        let outcome = (&mut self.writer).await;
        self.cleaned(outcome)
    }

    async fn abandon(mut self, failure: Failure) -> Failure {
        self.failed().await;
        failure
    }

    /// What went wrong; a file that was not there before does not stay in half.
    fn cleaned(&self, outcome: Result<io::Result<()>, tokio::task::JoinError>) -> Failure {
        if self.is_new {
            let _ = std::fs::remove_file(&self.path);
        }
        match outcome {
            Ok(Ok(())) => broken_off(),
            Ok(Err(failure)) => explain(&self.path, &failure),
            Err(failure) => (StatusCode::INTERNAL_SERVER_ERROR, failure.to_string()),
        }
    }
}

/// Open for writing from the start, make what is missing above. Watchers see create, chmod, write:
/// the order of E2B's agent.
fn create(path: &Path, how: &How) -> io::Result<(File, bool)> {
    if let Some(parent) = path.parent() {
        operations::make_parents(parent, &how.user)?;
    }
    let is_new = std::fs::symlink_metadata(path).is_err();
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        // A pipe without a reader would keep this thread for ever.
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    sys::fchown(&file, how.user.uid, how.user.gid)?;
    metadata::replace(&file, &how.metadata)?;
    Ok((file, is_new))
}

enum Sink {
    Plain(File),
    Gzip(Box<GzDecoder<File>>),
}

impl Sink {
    fn new(file: File, gzip: bool) -> Self {
        if gzip {
            Self::Gzip(Box::new(GzDecoder::new(file)))
        } else {
            Self::Plain(file)
        }
    }

    fn write(&mut self, data: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(file) => file.write_all(data),
            Self::Gzip(decoder) => decoder.write_all(data),
        }
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Gzip(decoder) => decoder.finish().map(drop),
        }
    }
}
