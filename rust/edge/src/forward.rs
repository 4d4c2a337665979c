//! The path of one request: admitted or held, there and back.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Incoming};
use hyper::header::{HeaderValue, CONNECTION};
use hyper::http::request::Parts;
use hyper::{Request, Response, StatusCode, Version};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use crate::admit::{admit, not_found, Admission};
use crate::answer::Answer;
use crate::body::{Download, Reply, Upload};
use crate::client::Client;
use crate::cut::Source;
use crate::flight::Flight;
use crate::headers;
use crate::http2;
use crate::sender::Protocol;
use crate::table::Table;
use crate::upgrade::Tunnel;
use crate::upstream::{Api, Lease, Upstream};
use crate::wake::Wakes;

/// Bytes of a body that are read although nobody wants them, and the time for it.
const UNWANTED: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(1);

/// What every request needs to know.
#[derive(Debug)]
pub struct Edge {
    pub table: Arc<Table>,
    pub api: Arc<Api>,
    pub wakes: Wakes,
    /// Connections and tunnels, which a drain waits for.
    pub tasks: TaskTracker,
}

/// Answers one request; failures are answers too.
pub async fn handle(
    edge: Arc<Edge>,
    client: Arc<Client>,
    request: Request<Incoming>,
) -> Result<Response<Reply>, Infallible> {
    let (mut head, body) = request.into_parts();
    let (version, bare) = (head.version, body.is_end_stream());
    let (answer, unread) = match enter(&edge, &client, &mut head).await {
        Ok((upstream, flight)) => {
            let request = Request::from_parts(head, body);
            match pass(&edge, client, upstream, flight, request).await {
                Ok(response) => return Ok(response),
                Err(answer) => (answer, !bare),
            }
        }
        Err(answer) => (answer, !drained(body).await),
    };
    let mut response = answer.response();
    if unread && version < Version::HTTP_2 {
        // The connection cannot be used again; a client that is not told would try.
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
    Ok(response)
}

/// Reads the body of a request that is not passed on; false if it is long, or long in coming.
async fn drained(mut body: Incoming) -> bool {
    let read = async {
        let mut size = 0;
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            size += frame.map_or(UNWANTED, |f| f.data_ref().map_or(0, Bytes::len));
            if size >= UNWANTED {
                return false;
            }
        }
        true
    };
    timeout(PATIENCE, read).await.unwrap_or(false)
}

/// Lets a request in, at once or when the sandbox it is for has been woken.
async fn enter(
    edge: &Edge,
    client: &Arc<Client>,
    head: &mut Parts,
) -> Result<(Upstream, Flight), Answer> {
    let multiplexed = head.version == Version::HTTP_2;
    let begin = |activity| Flight::begin(Arc::clone(client), activity, multiplexed);
    let mut held = None;
    loop {
        match admit(&edge.table, &edge.api, head)? {
            Admission::Pass(upstream) => {
                let earlier = held.map(|(flight, _)| flight);
                let flight = earlier.unwrap_or_else(|| begin(Arc::clone(upstream.activity())));
                return Ok((upstream, flight));
            }
            Admission::Wake(sleep) => {
                let begin = || (begin(Arc::clone(&sleep.activity)), edge.wakes.deadline());
                let (_, deadline) = held.get_or_insert_with(begin);
                edge.wakes.hold(&sleep, *deadline).await?;
            }
        }
    }
}

async fn pass(
    edge: &Edge,
    client: Arc<Client>,
    upstream: Upstream,
    flight: Flight,
    mut request: Request<Incoming>,
) -> Result<Response<Reply>, Answer> {
    let multiplexed = request.version() == Version::HTTP_2;
    let upstream = upstream.asked_by(multiplexed && http2::is_grpc(request.headers()));
    if multiplexed {
        let chunked = upstream.speaks(Protocol::Http1) && !request.body().is_end_stream();
        http2::to_http1(request.headers_mut(), chunked);
    }
    let upgrading = headers::request(request.headers_mut(), client.peer.ip(), client.secure);
    let tunnel = upgrading.then(|| Tunnel::prepare(&mut request, client));
    let request = onward(request, &upstream);
    let (response, lease) = match &upstream {
        Upstream::Api(_) => upstream.send(request).await?,
        Upstream::Guest { link, .. } => tokio::select! {
            biased;
            sent = upstream.send(request) => sent?,
            () = link.gone.cancelled() => return Err(not_found(link.id)),
        },
    };
    match tunnel {
        Some(tunnel) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
            Ok(tunnel.open(&edge.tasks, &upstream, response, flight))
        }
        _ => deliver(&upstream, response, lease, flight),
    }
}

/// The request for the next hop, its body counted.
fn onward(request: Request<Incoming>, upstream: &Upstream) -> Request<Upload> {
    let (mut parts, body) = request.into_parts();
    parts.version = Version::HTTP_11;
    if upstream.speaks(Protocol::Http2) {
        parts.version = Version::HTTP_2;
        http2::to_absolute_form(&mut parts.uri, &mut parts.headers);
    }
    parts.extensions.clear();
    let body = Upload::new(body, Arc::clone(upstream.activity()));
    Request::from_parts(parts, body)
}

fn deliver(
    upstream: &Upstream,
    response: Response<Incoming>,
    lease: Lease,
    mut flight: Flight,
) -> Result<Response<Reply>, Answer> {
    let (mut parts, body) = response.into_parts();
    let source = Arc::new(Source::new(body, lease));
    if let Upstream::Guest { link, .. } = upstream {
        flight.bind(link, &source).map_err(|_| not_found(link.id))?;
    }
    headers::response(&mut parts.headers, false);
    parts.version = Version::HTTP_11;
    parts.extensions.clear();
    let download = Download::new(source, flight);
    Ok(Response::from_parts(
        parts,
        Reply::Stream(Box::new(download)),
    ))
}
