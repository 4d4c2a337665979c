//! The two kinds of server behind the edge, and how a request is put to one of them.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::{Request, Response};
use tokio::net::{TcpSocket, UnixStream};
use tokio::time::{sleep, timeout, timeout_at, Instant};

use crate::activity::Activity;
use crate::answer::Answer;
use crate::body::Upload;
use crate::pool::{Place, Pool};
use crate::route::AGENT_PORT;
use crate::sender::{Protocol, Sender, Unanswered};
use crate::table::Link;

/// A guest under emulation may take seconds to answer a SYN.
const CONNECT: Duration = Duration::from_secs(10);
/// How often a socket that does not accept is tried again.
const KNOCK: Duration = Duration::from_millis(50);
/// Below the 5 s after which common servers (uvicorn, Node) close an idle connection, which a
/// request that must not be sent twice could run into.
const SURELY_OPEN: Duration = Duration::from_secs(4);
/// How long the rest of an upload may take after its answer, for the connection to be kept.
const SETTLE: Duration = Duration::from_secs(5);

/// The API server on its unix socket.
#[derive(Debug)]
pub struct Api {
    path: PathBuf,
    wait: Duration,
    pub pool: Pool,
    pub activity: Arc<Activity>,
    /// Held by the one who knocks while the server is away; the others wait behind.
    knocking: tokio::sync::Mutex<()>,
}

impl Api {
    pub fn new(path: PathBuf, wait: Duration) -> Self {
        Self {
            path,
            wait,
            pool: Pool::default(),
            activity: Arc::default(),
            knocking: tokio::sync::Mutex::default(),
        }
    }

    async fn connect(&self) -> io::Result<UnixStream> {
        match UnixStream::connect(&self.path).await {
            Err(error) if is_away(&error) => {
                let deadline = Instant::now() + self.wait;
                timeout_at(deadline, self.connect_when_back()).await?
            }
            done => done,
        }
    }

    async fn connect_when_back(&self) -> io::Result<UnixStream> {
        let _turn = self.knocking.lock().await;
        loop {
            match UnixStream::connect(&self.path).await {
                Err(error) if is_away(&error) => sleep(KNOCK).await,
                done => return done,
            }
        }
    }
}

fn is_away(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::WouldBlock
    )
}

#[derive(Debug, Clone)]
pub enum Upstream {
    Api(Arc<Api>),
    Guest {
        link: Arc<Link>,
        port: u16,
        protocol: Protocol,
    },
}

impl Upstream {
    pub fn guest(link: &Arc<Link>, port: u16) -> Self {
        Self::Guest {
            link: Arc::clone(link),
            port,
            protocol: Protocol::Http1,
        }
    }

    /// gRPC is nothing without HTTP/2; our own servers do not speak it.
    pub fn asked_by(mut self, grpc: bool) -> Self {
        match &mut self {
            Self::Guest { port, protocol, .. } if grpc && *port != AGENT_PORT => {
                *protocol = Protocol::Http2;
            }
            _ => {}
        }
        self
    }

    pub fn activity(&self) -> &Arc<Activity> {
        match self {
            Self::Api(api) => &api.activity,
            Self::Guest { link, .. } => &link.activity,
        }
    }

    /// Puts a request; one on a pooled connection that was closed meanwhile is put once more on
    /// a fresh one, if none of it was sent or if sending it twice changes nothing.
    pub async fn send(
        &self,
        mut request: Request<Upload>,
    ) -> Result<(Response<Incoming>, Lease), Answer> {
        let twin = twin(&request);
        if let Some(sender) = self.pooled(twin.is_some()) {
            match self.put(sender, request).await {
                Ok(done) => return Ok(done),
                Err((error, unsent)) => match unsent.or(twin) {
                    Some(again) => request = again,
                    None => return Err(self.broken(&error)),
                },
            }
        }
        let sender = self.connect().await?;
        let done = self.put(sender, request).await;
        done.map_err(|(error, _)| self.broken(&error))
    }

    pub fn speaks(&self, asked: Protocol) -> bool {
        self.pool().1 .1 == asked
    }

    fn pool(&self) -> (&Pool, Place) {
        match self {
            Self::Api(api) => (&api.pool, (0, Protocol::Http1)),
            Self::Guest {
                link,
                port,
                protocol,
            } => (&link.pool, (*port, *protocol)),
        }
    }

    fn pooled(&self, repeatable: bool) -> Option<Sender> {
        let (pool, place) = self.pool();
        let patient = repeatable || place.0 == AGENT_PORT; // our agent never closes first
        pool.take(place, if patient { Duration::MAX } else { SURELY_OPEN })
    }

    async fn put(
        &self,
        mut sender: Sender,
        request: Request<Upload>,
    ) -> Result<(Response<Incoming>, Lease), Unanswered> {
        let response = sender.send(request).await?;
        let upstream = self.clone();
        Ok((response, Lease { upstream, sender }))
    }

    async fn connect(&self) -> Result<Sender, Answer> {
        let begun = match self {
            Self::Api(api) => {
                let stream = api.connect().await.map_err(|_| Answer::ApiAway)?;
                Sender::begin(stream, Protocol::Http1).await
            }
            Self::Guest {
                link,
                port,
                protocol,
            } => {
                let stream = dial(link, *port)
                    .await
                    .map_err(|error| unreachable(link, *port, &error))?;
                Sender::begin(stream, *protocol).await
            }
        };
        begun.map_err(|error| self.broken(&error))
    }

    fn broken(&self, error: &hyper::Error) -> Answer {
        let why = error.to_string();
        match self {
            Self::Api(_) => Answer::ApiBroken { why },
            Self::Guest { link, port, .. } => Answer::Broken {
                id: link.id.as_str().to_owned(),
                port: *port,
                why,
            },
        }
    }
}

/// A connection in use, to be given back once its response has ended.
#[derive(Debug)]
pub struct Lease {
    upstream: Upstream,
    sender: Sender,
}

impl Lease {
    pub fn give_back(self) {
        let Self {
            upstream,
            mut sender,
        } = self;
        if sender.is_ready() {
            let (pool, place) = upstream.pool();
            return pool.put(place, sender);
        }
        if sender.is_closed() {
            return;
        }
        tokio::spawn(async move {
            if let Ok(Ok(())) = timeout(SETTLE, sender.ready()).await {
                let (pool, place) = upstream.pool();
                pool.put(place, sender);
            }
        });
    }
}

/// The same request again, if it has no body and may be repeated.
fn twin(request: &Request<Upload>) -> Option<Request<Upload>> {
    let repeatable =
        request.method().is_idempotent() && http_body::Body::is_end_stream(request.body());
    repeatable.then(|| {
        let mut twin = Request::new(request.body().without_data());
        *twin.method_mut() = request.method().clone();
        *twin.version_mut() = request.version();
        *twin.uri_mut() = request.uri().clone();
        *twin.headers_mut() = request.headers().clone();
        twin
    })
}

async fn dial(link: &Link, port: u16) -> io::Result<tokio::net::TcpStream> {
    let address = link.address(port);
    let socket = link.netns.tcp(&address)?;
    socket.set_tcp_nodelay(true)?;
    let socket = TcpSocket::from_std_stream(socket.into());
    timeout(CONNECT, socket.connect(address)).await?
}

fn unreachable(link: &Link, port: u16, error: &io::Error) -> Answer {
    let id = link.id.as_str().to_owned();
    match error.kind() {
        ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset => {
            Answer::PortClosed { id, port }
        }
        _ => Answer::Unreachable {
            id,
            port,
            why: error.to_string(),
        },
    }
}
