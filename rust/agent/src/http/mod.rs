//! The in-guest API: HTTP/1.1, plain routes and Connect RPCs (E2B.md §2).

mod archive;
mod auth;
mod changes;
mod compose;
pub mod connect;
pub mod connections;
mod download;
mod filesystem;
mod input;
mod processes;
mod tunnel;
mod upload;
pub mod watchers;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{json, Value};
use tokio::net::TcpListener;

use crate::control;
use crate::state::Agent;

pub type Body = BoxBody<Bytes, io::Error>;
pub type Answer = Response<Body>;

/// Bytes of a body that are read although nobody wants them, and the time for it.
const REFUSED_BODY: usize = 64 << 20;
const REFUSED_TIME: Duration = Duration::from_secs(10);

pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address).await?;
    println!("agentenv-agent: listening on {}", listener.local_addr()?);
    Ok(listener)
}

pub async fn serve(listener: TcpListener, agent: Arc<Agent>) -> io::Result<()> {
    loop {
        let (connection, _) = match listener.accept().await {
            Ok(accepted) => accepted,
            // Out of descriptors or a connection gone already: neither ends the service.
            Err(_) => {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                continue;
            }
        };
        let _ = connection.set_nodelay(true);
        let agent = Arc::clone(&agent);
        tokio::spawn(async move {
            let carried = async {
                let service = service_fn(|request| answer(Arc::clone(&agent), request));
                let _ = hyper::server::conn::http1::Builder::new()
                    .half_close(true)
                    .serve_connection(TokioIo::new(connection), service)
                    .with_upgrades()
                    .await;
            };
            agent.connections.carry(carried).await;
        });
    }
}

async fn answer(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Answer, Infallible> {
    if agent.init().is_none() {
        return Ok(error(
            StatusCode::SERVICE_UNAVAILABLE,
            "the sandbox is not initialised yet",
        ));
    }
    let path = request.uri().path().to_owned();
    if path == "/health" {
        return Ok(empty(StatusCode::NO_CONTENT));
    }
    if let Err(message) = auth::check(&agent, &request) {
        return Ok(settle(request, error(StatusCode::UNAUTHORIZED, &message)).await);
    }
    Ok(match (request.method(), path.as_str()) {
        (&Method::GET | &Method::HEAD, "/files") => download::get(&agent, &request).await,
        (&Method::POST, "/files") => upload::post(&agent, request).await,
        (&Method::POST, "/files/compose") => compose::post(&agent, request).await,
        (&Method::GET, "/archive") => archive::get(&agent, &request).await,
        (&Method::POST, "/archive") => archive::post(&agent, request).await,
        (&Method::GET, "/changes") => changes::get(&agent, &request).await,
        (&Method::GET, "/tcp") => tunnel::open(agent, request).await,
        (&Method::GET, "/metrics") => json_answer(StatusCode::OK, &metrics(&agent).await),
        (&Method::GET, "/envs") => {
            let env = agent
                .init()
                .map(|init| init.env.clone())
                .unwrap_or_default();
            json_answer(StatusCode::OK, &json!(env))
        }
        (&Method::POST, path) => match path.rsplit_once('/') {
            Some(("/process.Process", method)) => {
                let method = method.to_owned();
                processes::call(agent, &method, request).await
            }
            Some(("/filesystem.Filesystem", method)) => {
                let method = method.to_owned();
                filesystem::call(agent, &method, request).await
            }
            _ => no_route(request).await,
        },
        _ => no_route(request).await,
    })
}

async fn no_route(request: Request<Incoming>) -> Answer {
    let message = format!(
        "no such route: {} {}",
        request.method(),
        request.uri().path()
    );
    settle(request, error(StatusCode::NOT_FOUND, &message)).await
}

/// An answer for which no more of the body is needed, which is read all the same: were as much as its
/// last chunk left, the connection would end, maybe before the answer is read, and a proxy may
/// already be sending the next request on it. A long rest says so.
pub async fn settle(request: Request<Incoming>, mut answer: Answer) -> Answer {
    let mut rest = Limited::new(request.into_body(), REFUSED_BODY);
    let read = async {
        loop {
            match rest.frame().await {
                None => return true,
                Some(Ok(_)) => {}
                Some(Err(_)) => return false,
            }
        }
    };
    let whole = tokio::time::timeout(REFUSED_TIME, read).await;
    if !whole.unwrap_or(false) {
        let close = hyper::header::HeaderValue::from_static("close");
        answer
            .headers_mut()
            .insert(hyper::header::CONNECTION, close);
    }
    answer
}

/// `GET /metrics` (E2B.md §2.3); the CPU share is over a short span, for want of a history.
async fn metrics(agent: &Agent) -> Value {
    let before = control::stats(agent);
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    let now = control::stats(agent);
    let delta =
        |name: &str| now[name].as_f64().unwrap_or(0.0) - before[name].as_f64().unwrap_or(0.0);
    let total = delta("cpu_total_s");
    let used = if total > 0.0 {
        delta("cpu_busy_s") / total * 100.0
    } else {
        0.0
    };
    let seconds = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| time.as_secs());
    let mib = |name: &str| now[name].as_u64().unwrap_or(0) >> 20;
    json!({
        "ts": seconds,
        "cpu_count": now["cpu_count"],
        "cpu_used_pct": (used * 100.0).round() / 100.0,
        "mem_total": now["mem_total"],
        "mem_used": now["mem_used"],
        "mem_cache": now["mem_cache"],
        "mem_total_mib": mib("mem_total"),
        "mem_used_mib": mib("mem_used"),
        "disk_used": now["disk_used"],
        "disk_total": now["disk_total"],
    })
}

pub fn full(data: impl Into<Bytes>) -> Body {
    Full::new(data.into())
        .map_err(|never: Infallible| match never {})
        .boxed()
}

pub fn empty(status: StatusCode) -> Answer {
    let mut answer = Response::new(full(Bytes::new()));
    *answer.status_mut() = status;
    answer
}

pub fn json_answer(status: StatusCode, value: &Value) -> Answer {
    let mut answer = Response::new(full(value.to_string()));
    *answer.status_mut() = status;
    answer
        .headers_mut()
        .insert(CONTENT_TYPE, "application/json".parse().expect("static"));
    answer
}

/// An error of the plain HTTP routes.
pub fn error(status: StatusCode, message: &str) -> Answer {
    json_answer(
        status,
        &json!({"code": status.as_u16(), "message": message}),
    )
}

/// The value of `name` in a query string, percent-decoded.
pub fn query(request: &Request<Incoming>, name: &str) -> Option<String> {
    request.uri().query()?.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (key == name).then(|| percent_decode(value))
    })
}

fn percent_decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = bytes
            .get(at + 1..at + 3)
            .and_then(|pair| std::str::from_utf8(pair).ok());
        match (
            bytes[at],
            hex.and_then(|pair| u8::from_str_radix(pair, 16).ok()),
        ) {
            (b'%', Some(byte)) => {
                out.push(byte);
                at += 3;
            }
            (b'+', _) => {
                out.push(b' ');
                at += 1;
            }
            (byte, _) => {
                out.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::percent_decode;

    #[test]
    fn queries_are_decoded_and_broken_escapes_kept() {
        for (given, wanted) in [
            ("a%2Fb+c", "a/b c"),
            ("%C3%A4", "ä"),
            ("100%", "100%"),
            ("%zz", "%zz"),
            ("%2", "%2"),
        ] {
            assert_eq!(percent_decode(given), wanted);
        }
    }
}
