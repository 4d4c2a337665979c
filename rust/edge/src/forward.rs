//! The path of one request: whom it is for, whether it may pass, there and back.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Incoming};
use hyper::header::{HeaderMap, HeaderName, HeaderValue, CONNECTION};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode, Version};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use crate::answer::Answer;
use crate::body::{Download, Reply, Upload};
use crate::client::Client;
use crate::cut::Source;
use crate::flight::Flight;
use crate::headers;
use crate::http2;
use crate::route::{self, SandboxId, Target, AGENT_PORT};
use crate::sender::Protocol;
use crate::signed::Claim;
use crate::table::{Policy, Table};
use crate::upgrade::Tunnel;
use crate::upstream::{Api, Lease, Upstream};

const TRAFFIC_TOKEN: HeaderName = HeaderName::from_static("e2b-traffic-access-token");

/// Bytes of a body that are read although nobody wants them, and the time for it.
const UNWANTED: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(1);

/// What every request needs to know.
#[derive(Debug)]
pub struct Edge {
    pub table: Arc<Table>,
    pub api: Arc<Api>,
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
    let (answer, unread) = match admit(&edge, &mut head) {
        Ok(upstream) => {
            let request = Request::from_parts(head, body);
            match pass(&edge, client, upstream, request).await {
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

/// Finds the upstream and adapts the request to it, or says why it may not pass.
fn admit(edge: &Edge, head: &mut Parts) -> Result<Upstream, Answer> {
    if head.method == Method::CONNECT {
        return Err(Answer::NoTunnels);
    }
    headers::to_origin_form(&mut head.uri, &mut head.headers);
    match route::target(&head.headers) {
        Ok(Target::Api) => admit_unnamed(edge, head),
        Ok(Target::Guest { id, port }) => admit_to_guest(edge, id, port, head),
        Ok(Target::Nobody(id)) => Err(unknown(edge, id)),
        Err(route::BadPort(port)) => Err(Answer::BadPort { port }),
    }
}

/// For the API, unless it is a signed URL of a file: that is for the sandbox that signed it.
fn admit_unnamed(edge: &Edge, head: &Parts) -> Result<Upstream, Answer> {
    let Some(claim) = Claim::of(&head.method, &head.uri) else {
        return Ok(Upstream::Api(Arc::clone(&edge.api)));
    };
    match edge
        .table
        .find_by_token(|token| claim.is_signed_with(token))
    {
        Some(route) => Ok(Upstream::guest(&route.link, AGENT_PORT)),
        None if edge.table.knows_all() => Err(Answer::BadSignature),
        None => Err(Answer::NotSynced),
    }
}

fn admit_to_guest(
    edge: &Edge,
    id: SandboxId,
    port: u16,
    head: &mut Parts,
) -> Result<Upstream, Answer> {
    let Some(route) = edge.table.get(&id) else {
        return Err(unknown(edge, id.as_str().to_owned()));
    };
    if port == AGENT_PORT {
        let path = head.uri.path();
        if route::is_internal(path) {
            return Err(Answer::Internal {
                path: path.to_owned(),
            });
        }
    } else {
        present_token(&route.policy, &mut head.headers).map_err(|Refused| {
            let id = id.as_str().to_owned();
            Answer::TokenNeeded { id, port }
        })?;
        if let Some(mask) = &route.policy.mask_host {
            headers::mask_host(&mut head.headers, mask, port);
        }
    }
    Ok(Upstream::guest(&route.link, port))
}

fn unknown(edge: &Edge, id: String) -> Answer {
    if edge.table.knows_all() {
        Answer::NotFound { id }
    } else {
        Answer::NotSynced
    }
}

struct Refused;

/// Checks the traffic token of a sandbox that is not public; the guest does not get to see it.
fn present_token(policy: &Policy, headers: &mut HeaderMap) -> Result<(), Refused> {
    let shown = headers.remove(TRAFFIC_TOKEN);
    if policy.public {
        return Ok(());
    }
    match (&policy.traffic_token, shown) {
        (Some(token), Some(shown)) if token.is(shown.as_bytes()) => Ok(()),
        _ => Err(Refused),
    }
}

async fn pass(
    edge: &Edge,
    client: Arc<Client>,
    upstream: Upstream,
    mut request: Request<Incoming>,
) -> Result<Response<Reply>, Answer> {
    let multiplexed = request.version() == Version::HTTP_2;
    let upstream = upstream.asked_by(multiplexed && http2::is_grpc(request.headers()));
    let activity = Arc::clone(upstream.activity());
    let flight = Flight::begin(Arc::clone(&client), activity, multiplexed);
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
            () = link.gone.cancelled() => return Err(gone(link.id)),
        },
    };
    match tunnel {
        Some(tunnel) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
            Ok(tunnel.open(&edge.tasks, &upstream, response, flight))
        }
        _ => deliver(&upstream, response, lease, flight),
    }
}

fn gone(id: SandboxId) -> Answer {
    Answer::NotFound {
        id: id.as_str().to_owned(),
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
        flight.bind(link, &source).map_err(|_| gone(link.id))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::Secret;
    use hyper::header::HeaderValue;

    fn policy(public: bool, token: Option<&str>) -> Policy {
        Policy {
            public,
            traffic_token: token.map(Secret::from),
            mask_host: None,
            access_token: None,
        }
    }

    fn passes(policy: &Policy, token: Option<&'static str>) -> bool {
        let mut headers = HeaderMap::new();
        if let Some(token) = token {
            headers.insert(TRAFFIC_TOKEN, HeaderValue::from_static(token));
        }
        let passed = present_token(policy, &mut headers).is_ok();
        assert!(headers.is_empty(), "the guest must not see the token");
        passed
    }

    #[test]
    fn a_public_sandbox_asks_for_nothing() {
        assert!(passes(&policy(true, Some("secret")), None));
        assert!(passes(&policy(true, None), Some("whatever")));
    }

    #[test]
    fn a_private_sandbox_wants_its_token() {
        let private = policy(false, Some("secret"));
        assert!(passes(&private, Some("secret")));
        for wrong in [
            None,
            Some(""),
            Some("secre"),
            Some("secret1"),
            Some("Secret"),
        ] {
            assert!(!passes(&private, wrong), "{wrong:?}");
        }
    }

    #[test]
    fn a_private_sandbox_without_a_token_is_closed() {
        assert!(!passes(&policy(false, None), Some("")));
        assert!(!passes(&policy(false, Some("")), Some("")));
    }
}
