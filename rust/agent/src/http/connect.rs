//! The Connect protocol with JSON: unary calls and streams of envelopes (E2B.md §2.4).
//!
//! Envelope: 1 byte flags, 4 bytes big-endian length, JSON. Flag 2 ends a stream with `{}` or an error.

use std::future::Future;
use std::io;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::{BodyExt, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{HeaderName, CONTENT_TYPE};
use hyper::{Request, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::{json, Value};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use super::{json_answer, Answer, Body};

/// The largest request: standard input in one piece, in base64.
const MAX_REQUEST: usize = 64 << 20;
pub const END_OF_STREAM: u8 = 2;
const HEAD: usize = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    InvalidArgument,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Unimplemented,
    Unauthenticated,
    DeadlineExceeded,
    Internal,
}

impl Code {
    /// Name and HTTP status, from Connect's specification.
    fn parts(self) -> (&'static str, u16) {
        match self {
            Self::InvalidArgument => ("invalid_argument", 400),
            Self::NotFound => ("not_found", 404),
            Self::AlreadyExists => ("already_exists", 409),
            Self::PermissionDenied => ("permission_denied", 403),
            Self::ResourceExhausted => ("resource_exhausted", 429),
            Self::FailedPrecondition => ("failed_precondition", 400),
            Self::Unimplemented => ("unimplemented", 501),
            Self::Unauthenticated => ("unauthenticated", 401),
            Self::DeadlineExceeded => ("deadline_exceeded", 504),
            Self::Internal => ("internal", 500),
        }
    }
}

#[derive(Debug)]
pub struct Fault {
    code: Code,
    pub message: String,
}

impl Fault {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    fn json(&self) -> Value {
        json!({"code": self.code.parts().0, "message": self.message})
    }
}

/// The answer of a unary call, or of its deadline.
pub async fn within(pace: Pace, work: impl Future<Output = Result<Value, Fault>>) -> Answer {
    tokio::select! {
        biased;
        result = work => unary(result),
        () = pace.deadline() => unary(Err(late())),
    }
}

/// The client's deadline passed.
pub fn late() -> Fault {
    Fault::new(Code::DeadlineExceeded, "the deadline of the request passed")
}

/// The answer of a unary call.
pub fn unary(result: Result<Value, Fault>) -> Answer {
    match result {
        Ok(value) => json_answer(StatusCode::OK, &value),
        Err(fault) => {
            let status = StatusCode::from_u16(fault.code.parts().1).expect("a valid status");
            json_answer(status, &fault.json())
        }
    }
}

/// The message of a unary call's body; an empty body is an empty message.
pub async fn message<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, Fault> {
    let data = whole(request).await?;
    parse(if data.is_empty() { b"{}" } else { &data })
}

/// The one message that opens a server stream.
pub async fn first_message<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, Fault> {
    let mut data = BytesMut::from(&whole(request).await?[..]);
    match take_envelope(&mut data)? {
        Some((flags, _)) if flags & END_OF_STREAM != 0 => Err(Fault::new(
            Code::InvalidArgument,
            "the request ends before its message",
        )),
        Some((_, message)) => parse(&message),
        None => Err(Fault::new(
            Code::InvalidArgument,
            "the request holds no message",
        )),
    }
}

async fn whole(request: Request<Incoming>) -> Result<Bytes, Fault> {
    let body = Limited::new(request.into_body(), MAX_REQUEST)
        .collect()
        .await;
    body.map(|collected| collected.to_bytes()).map_err(|error| {
        Fault::new(
            Code::InvalidArgument,
            format!("the body broke off: {error}"),
        )
    })
}

pub fn parse<T: DeserializeOwned>(data: &[u8]) -> Result<T, Fault> {
    serde_json::from_slice(data)
        .map_err(|error| Fault::new(Code::InvalidArgument, format!("malformed message: {error}")))
}

/// The next whole envelope in `data`: flags and message. None: more bytes are needed.
pub fn take_envelope(data: &mut BytesMut) -> Result<Option<(u8, Bytes)>, Fault> {
    if data.len() < HEAD {
        return Ok(None);
    }
    let length = u32::from_be_bytes([data[1], data[2], data[3], data[4]]) as usize;
    if length > MAX_REQUEST {
        return Err(Fault::new(
            Code::InvalidArgument,
            "the message is too large",
        ));
    }
    if data.len() < HEAD + length {
        return Ok(None);
    }
    let mut whole = data.split_to(HEAD + length);
    let flags = whole[0];
    if flags & !END_OF_STREAM != 0 {
        let message = format!("envelope flags {flags:#x} are not supported (1 is compression)");
        return Err(Fault::new(Code::Unimplemented, message));
    }
    Ok(Some((flags, whole.split_off(HEAD).freeze())))
}

fn envelope(flags: u8, message: &Value) -> Bytes {
    let text = message.to_string();
    let mut data = BytesMut::with_capacity(HEAD + text.len());
    data.put_u8(flags);
    data.put_u32(text.len() as u32);
    data.put_slice(text.as_bytes());
    data.freeze()
}

/// The server's end of a stream. A failed send means that the client has gone.
pub struct Sender(mpsc::Sender<io::Result<Frame<Bytes>>>);

impl Sender {
    pub async fn message(&self, message: &Value) -> Result<(), Gone> {
        self.send(envelope(0, message)).await
    }

    pub async fn end(self, outcome: Result<(), Fault>) {
        let last = match outcome {
            Ok(()) => json!({}),
            Err(fault) => json!({"error": fault.json()}),
        };
        let _ = self.send(envelope(END_OF_STREAM, &last)).await;
    }

    pub async fn closed(&self) {
        self.0.closed().await;
    }

    async fn send(&self, data: Bytes) -> Result<(), Gone> {
        self.0.send(Ok(Frame::data(data))).await.map_err(|_| Gone)
    }
}

/// The client closed its connection.
pub struct Gone;

/// A stream's answer and the end that feeds it; two pieces are buffered, then the sender waits.
pub fn stream() -> (Sender, Answer) {
    let (sender, receiver) = mpsc::channel(2);
    let mut answer = Response::new(channel_body(receiver));
    answer.headers_mut().insert(
        CONTENT_TYPE,
        "application/connect+json".parse().expect("static"),
    );
    (Sender(sender), answer)
}

/// A body that is what comes through the channel.
pub fn channel_body(receiver: mpsc::Receiver<io::Result<Frame<Bytes>>>) -> Body {
    BodyExt::boxed(StreamBody::new(ReceiverStream::new(receiver)))
}

/// A stream that only says what was wrong: errors of streams come with status 200.
pub fn failed_stream(fault: Fault) -> Answer {
    let (sender, answer) = stream();
    tokio::spawn(sender.end(Err(fault)));
    answer
}

/// A header that holds a number.
fn number(request: &Request<Incoming>, name: &'static str) -> Option<u64> {
    request
        .headers()
        .get(HeaderName::from_static(name))?
        .to_str()
        .ok()?
        .trim()
        .parse()
        .ok()
}

/// Silence after which a keepalive is sent, unless the client names another span.
const KEEPALIVE: Duration = Duration::from_secs(90);

/// What a client wants of a stream's timing.
#[derive(Clone)]
pub struct Pace {
    pub keepalive: Duration,
    deadline: Option<Instant>,
}

impl Pace {
    pub fn of(request: &Request<Incoming>) -> Self {
        let keepalive = number(request, "keepalive-ping-interval").filter(|s| *s > 0);
        Self {
            keepalive: keepalive.map_or(KEEPALIVE, Duration::from_secs),
            deadline: deadline(request).map(|span| Instant::now() + span),
        }
    }

    /// Return when the deadline has passed; never, if there is none.
    pub async fn deadline(&self) {
        match self.deadline {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }
}

/// The caller's deadline, if it set one.
fn deadline(request: &Request<Incoming>) -> Option<Duration> {
    number(request, "connect-timeout-ms")
        .filter(|ms| *ms > 0)
        .map(Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelopes_survive_any_cut() {
        let whole = [envelope(0, &json!({"a": 1})), envelope(2, &json!({}))].concat();
        for cut in 0..whole.len() {
            let mut data = BytesMut::from(&whole[..cut]);
            let mut found = 0;
            while take_envelope(&mut data).unwrap().is_some() {
                found += 1;
            }
            data.extend_from_slice(&whole[cut..]);
            while take_envelope(&mut data).unwrap().is_some() {
                found += 1;
            }
            assert_eq!((found, data.len()), (2, 0));
        }
    }

    #[test]
    fn flags_that_we_do_not_know_are_refused() {
        let mut data = BytesMut::from(&[1, 0, 0, 0, 2, b'{', b'}'][..]);
        assert!(take_envelope(&mut data).is_err());
    }

    #[test]
    fn a_huge_length_is_refused_before_anything_is_kept() {
        let mut data = BytesMut::from(&[0, 0xff, 0xff, 0xff, 0xff][..]);
        assert!(take_envelope(&mut data).is_err());
    }
}
