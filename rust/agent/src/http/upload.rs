//! `POST /files`: one raw file or several in a form, streamed to disk.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE};
use hyper::{Request, StatusCode};
use serde_json::{json, Value};
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;

use super::{error, json_answer, query, settle, Answer};
use crate::fs::metadata::{self, Metadata};
use crate::fs::resolve;
use crate::fs::target::{self, Target, Wanted};
use crate::state::Agent;
use crate::users::User;

/// Bytes that are gathered before they are written.
const BATCH: usize = 256 << 10;
/// A client that sends nothing for so long has gone, and must not keep others from the file.
pub const SILENCE: Duration = Duration::from_secs(300);

/// What holds for all files of one upload.
#[derive(Clone)]
struct How {
    user: User,
    gzip: bool,
    metadata: Metadata,
}

/// A failed upload: status and message.
pub type Failure = (StatusCode, String);

pub async fn post(agent: &Agent, mut request: Request<Incoming>) -> Answer {
    let answer = match receive(agent, &mut request).await {
        Ok(written) => json_answer(StatusCode::OK, &json!(written)),
        Err((status, message)) => error(status, &message),
    };
    settle(request, answer).await
}

async fn receive(agent: &Agent, request: &mut Request<Incoming>) -> Result<Vec<Value>, Failure> {
    let user = user(agent, query(request, "username").as_deref())?;
    let path = query(request, "path").filter(|path| !path.is_empty());
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
        metadata: noted(request)?,
    };
    if let Ok(boundary) = multer::parse_boundary(&kind) {
        return receive_form(agent, &how, path, boundary, request.body_mut()).await;
    }
    let path = path.ok_or_else(|| bad("the path query parameter is missing".to_owned()))?;
    let mut upload = Upload::begin(agent, &how, &path)?;
    let body = request.body_mut();
    while let Some(frame) = timeout(SILENCE, body.frame()).await.map_err(|_| silent())? {
        match frame {
            Ok(frame) => upload.write(frame.into_data().unwrap_or_default()).await?,
            Err(_) => return Err(broken_off()),
        }
    }
    Ok(vec![upload.finish().await?])
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
    body: &mut Incoming,
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
        let mut upload = Upload::begin(agent, how, &name)?;
        loop {
            match timeout(SILENCE, part.chunk()).await.map_err(|_| silent())? {
                Ok(Some(data)) => upload.write(data).await?,
                Ok(None) => break,
                Err(failure) => return Err(malformed(failure)),
            }
        }
        written.push(upload.finish().await?);
    }
    if written.is_empty() {
        return Err(bad("the form holds no part named 'file'".to_owned()));
    }
    Ok(written)
}

/// The user called `name`, or the default.
pub fn user(agent: &Agent, name: Option<&str>) -> Result<User, Failure> {
    agent
        .user(name)
        .map_err(|message| (StatusCode::UNAUTHORIZED, message))
}

pub fn bad(message: String) -> Failure {
    (StatusCode::BAD_REQUEST, message)
}

pub fn silent() -> Failure {
    let message = format!("nothing came for {} s", SILENCE.as_secs());
    (StatusCode::REQUEST_TIMEOUT, message)
}

fn broken_off() -> Failure {
    bad("the upload broke off".to_owned())
}

pub fn explain(path: &Path, failure: &io::Error) -> Failure {
    let path = path.display();
    match failure.raw_os_error() {
        Some(libc::ENXIO) => return bad(format!("'{path}': not a regular file")), // an unread pipe
        Some(libc::ELOOP) => return bad(format!("'{path}': {failure}")),
        _ => {}
    }
    match failure.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => (
            StatusCode::INSUFFICIENT_STORAGE,
            "not enough disk space".to_owned(),
        ),
        io::ErrorKind::IsADirectory => bad(format!("path '{path}' is a directory")),
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::WriteZero => {
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

/// One file on its way to the disk, piece by piece in other threads: a slow disk does not stop the
/// agent, a slow client does not hold a thread.
struct Upload {
    path: PathBuf,
    sink: Option<Sink>,
    held: Vec<Bytes>,
    size: usize,
    turn: Option<OwnedMutexGuard<()>>,
}

impl Upload {
    fn begin(agent: &Agent, how: &How, given: &str) -> Result<Self, Failure> {
        let path = PathBuf::from(resolve(agent, &how.user, given).map_err(bad)?);
        let target = Target::new(Wanted {
            path: path.clone(),
            owner: how.user.clone(),
            metadata: how.metadata.clone(),
        });
        Ok(Self {
            path,
            sink: Some(Sink::new(target, how.gzip)),
            held: Vec::new(),
            size: 0,
            turn: None,
        })
    }

    async fn write(&mut self, data: Bytes) -> Result<(), Failure> {
        self.size += data.len();
        self.held.push(data);
        if self.size < BATCH {
            return Ok(());
        }
        self.sink = Some(self.pass_on(Ok).await?);
        Ok(())
    }

    async fn finish(mut self) -> Result<Value, Failure> {
        self.pass_on(Sink::finish).await?;
        Ok(describe(&self.path))
    }

    /// Write what is held, then have `next` of the sink.
    async fn pass_on<T: Send + 'static>(
        &mut self,
        next: fn(Sink) -> io::Result<T>,
    ) -> Result<T, Failure> {
        if self.turn.is_none() {
            self.turn = Some(target::turn(&self.path).await);
        }
        self.size = 0;
        let pieces = std::mem::take(&mut self.held);
        let mut sink = self.sink.take().expect("given back after each piece");
        let written = tokio::task::spawn_blocking(move || {
            for piece in pieces {
                sink.write(&piece)?;
            }
            next(sink)
        });
        match written.await {
            Ok(outcome) => outcome.map_err(|failure| explain(&self.path, &failure)),
            Err(failure) => Err((StatusCode::INTERNAL_SERVER_ERROR, failure.to_string())),
        }
    }
}

pub fn describe(path: &Path) -> Value {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut written = json!({"name": name, "type": "file", "path": path.to_string_lossy()});
    let noted = metadata::read(path);
    if !noted.is_empty() {
        written["metadata"] = json!(noted);
    }
    written
}

enum Sink {
    Plain(Target),
    Gzip(Box<MultiGzDecoder<Target>>),
}

impl Sink {
    fn new(target: Target, gzip: bool) -> Self {
        if gzip {
            Self::Gzip(Box::new(MultiGzDecoder::new(target)))
        } else {
            Self::Plain(target)
        }
    }

    fn write(&mut self, data: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(target) => target.write_all(data),
            Self::Gzip(decoder) => decoder.write_all(data),
        }
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Self::Plain(target) => target.finish(),
            Self::Gzip(decoder) => decoder.finish()?.finish(),
        }
    }
}
