//! `GET /files`: a file's bytes, streamed.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use bytes::Bytes;
use hyper::body::{Frame, Incoming};
use hyper::header::{
    ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, RANGE, VARY,
};
use hyper::{Request, Response, StatusCode};
use tokio::sync::mpsc;

use super::connect::channel_body;
use super::{error, query, Answer};
use crate::fs::resolve;
use crate::state::Agent;

const CHUNK: usize = 256 << 10;
/// Pieces read ahead of the client.
const QUEUE: usize = 2;

pub async fn get(agent: &Agent, request: &Request<Incoming>) -> Answer {
    let user = match agent.user(query(request, "username").as_deref()) {
        Ok(user) => user,
        Err(message) => return error(StatusCode::UNAUTHORIZED, &message),
    };
    let given = query(request, "path").unwrap_or_default();
    let path = match resolve(agent, &user, &given) {
        Ok(path) => path,
        Err(message) => return error(StatusCode::BAD_REQUEST, &message),
    };
    let opened = {
        let path = path.clone();
        tokio::task::spawn_blocking(move || open(&path)).await
    };
    match opened {
        Ok(Ok((file, size))) => send(file, size, range(request, size), &path),
        Ok(Err(failure)) => explain(&path, &failure),
        Err(failure) => error(StatusCode::INTERNAL_SERVER_ERROR, &failure.to_string()),
    }
}

fn open(path: &str) -> io::Result<(File, u64)> {
    // A pipe without a writer would keep this thread for ever.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let meta = file.metadata()?;
    if meta.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !meta.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    Ok((file, meta.len()))
}

pub fn explain(path: &str, failure: &io::Error) -> Answer {
    match failure.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => error(
            StatusCode::NOT_FOUND,
            &format!("path '{path}' does not exist"),
        ),
        io::ErrorKind::IsADirectory => error(
            StatusCode::BAD_REQUEST,
            &format!("path '{path}' is a directory"),
        ),
        io::ErrorKind::InvalidInput
        | io::ErrorKind::InvalidFilename
        | io::ErrorKind::PermissionDenied => {
            error(StatusCode::BAD_REQUEST, &format!("'{path}': {failure}"))
        }
        _ => error(
            StatusCode::INTERNAL_SERVER_ERROR,
            &format!("'{path}': {failure}"),
        ),
    }
}

/// `bytes=a-b`, `bytes=a-`, `bytes=-n` as (first, past the last). Other forms are ignored, as
/// RFC 9110 allows; None inside: it cannot be satisfied.
fn range(request: &Request<Incoming>, size: u64) -> Option<Option<(u64, u64)>> {
    let text = request
        .headers()
        .get(RANGE)?
        .to_str()
        .ok()?
        .strip_prefix("bytes=")?;
    parse_range(text, size)
}

fn parse_range(text: &str, size: u64) -> Option<Option<(u64, u64)>> {
    let (first, last) = text.split_once('-')?;
    let (first, past) = if first.is_empty() {
        let length: u64 = last.parse().ok()?;
        (size.saturating_sub(length), size)
    } else {
        let first = first.parse().ok()?;
        let past = if last.is_empty() {
            size
        } else {
            last.parse::<u64>().ok()?.saturating_add(1)
        };
        (first, past.min(size))
    };
    Some((first < past).then_some((first, past)))
}

fn send(file: File, size: u64, wanted: Option<Option<(u64, u64)>>, path: &str) -> Answer {
    let (status, span) = match wanted {
        None => (StatusCode::OK, None),
        Some(Some(span)) => (StatusCode::PARTIAL_CONTENT, Some(span)),
        Some(None) => {
            let mut answer = error(
                StatusCode::RANGE_NOT_SATISFIABLE,
                "the range lies behind the end",
            );
            let total = format!("bytes */{size}").parse().expect("digits");
            answer.headers_mut().insert(CONTENT_RANGE, total);
            return answer;
        }
    };
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(read_into(sender, file, span));
    let mut answer = Response::new(channel_body(receiver));
    *answer.status_mut() = status;
    let name = Path::new(path)
        .file_name()
        .map_or("".into(), |name| name.to_string_lossy());
    let name: String = name
        .chars()
        .filter(|c| c.is_ascii_graphic() && *c != '"')
        .collect();
    let mut put = |key, value: String| {
        if let Ok(value) = value.parse() {
            answer.headers_mut().insert(key, value);
        }
    };
    put(CONTENT_TYPE, "application/octet-stream".to_owned());
    put(CONTENT_DISPOSITION, format!("inline; filename=\"{name}\""));
    put(VARY, "Accept-Encoding".to_owned());
    put(ACCEPT_RANGES, "bytes".to_owned());
    if let Some((first, past)) = span {
        put(CONTENT_RANGE, format!("bytes {first}-{}/{size}", past - 1));
        put(CONTENT_LENGTH, (past - first).to_string());
    }
    // Without a range there is no Content-Length: files of /proc say 0 and hold more.
    answer
}

/// Send the file's bytes; each piece is read in another thread, none of which a slow client holds.
async fn read_into(
    sender: mpsc::Sender<io::Result<Frame<Bytes>>>,
    mut file: File,
    span: Option<(u64, u64)>,
) {
    let (mut at, mut left) = match span {
        Some((first, past)) => (Some(first), past - first),
        None => (None, u64::MAX),
    };
    while left > 0 {
        let most = CHUNK.min(usize::try_from(left).unwrap_or(CHUNK));
        let begin = at.take();
        let read = tokio::task::spawn_blocking(move || {
            let piece = read_piece(&mut file, begin, most);
            (file, piece)
        });
        let Ok((back, piece)) = read.await else {
            return;
        };
        file = back;
        match piece {
            Ok(piece) if piece.is_empty() => return,
            Ok(piece) => {
                left -= piece.len() as u64;
                if sender.send(Ok(Frame::data(piece))).await.is_err() {
                    return;
                }
            }
            Err(failure) => {
                let _ = sender.send(Err(failure)).await;
                return;
            }
        }
    }
}

fn read_piece(file: &mut File, begin: Option<u64>, most: usize) -> io::Result<Bytes> {
    if let Some(first) = begin {
        file.seek(SeekFrom::Start(first))?;
    }
    let mut buffer = vec![0; most];
    let read = file.read(&mut buffer)?;
    buffer.truncate(read);
    Ok(Bytes::from(buffer))
}

#[cfg(test)]
mod tests {
    use super::parse_range;

    #[test]
    fn ranges() {
        assert_eq!(parse_range("0-9", 100), Some(Some((0, 10))));
        assert_eq!(parse_range("90-", 100), Some(Some((90, 100))));
        assert_eq!(parse_range("-5", 100), Some(Some((95, 100))));
        assert_eq!(parse_range("50-1000", 100), Some(Some((50, 100))));
        assert_eq!(parse_range("100-", 100), Some(None));
        assert_eq!(parse_range("a-b", 100), None);
        assert_eq!(
            parse_range("0-18446744073709551615", 100),
            Some(Some((0, 100)))
        );
    }
}
