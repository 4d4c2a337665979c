//! `GET /tcp?port=N`, upgraded to `tcp`: bytes to and from a port of the sandbox's loopback. Ours,
//! not E2B's: for what does not speak HTTP, or listens on loopback only.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{HeaderValue, CONNECTION, UPGRADE};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;

use super::{empty, error, query, Answer};
use crate::state::Agent;

const PROTOCOL: &str = "tcp";

pub async fn open(agent: Arc<Agent>, mut request: Request<Incoming>) -> Answer {
    let asked = request.headers().get(UPGRADE);
    if asked.is_none_or(|value| !value.as_bytes().eq_ignore_ascii_case(PROTOCOL.as_bytes())) {
        let message = "ask for it with `Connection: upgrade` and `Upgrade: tcp`";
        return error(StatusCode::UPGRADE_REQUIRED, message);
    }
    let port = query(&request, "port").and_then(|text| text.parse::<u16>().ok());
    let Some(port) = port.filter(|port| *port > 0) else {
        return error(StatusCode::BAD_REQUEST, "port must be from 1 to 65535");
    };
    let mut far = match connect(port).await {
        Ok(far) => far,
        Err(failure) => {
            let message = format!("port {port} of the sandbox does not answer: {failure}");
            return error(StatusCode::BAD_GATEWAY, &message);
        }
    };
    let upgraded = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let carried = async {
            if let Ok(near) = upgraded.await {
                // Either side may end or fail at any time: that is how a tunnel ends.
                let _ = copy_bidirectional(&mut TokioIo::new(near), &mut far).await;
            }
        };
        agent.connections.carry(carried).await;
    });
    let mut answer = empty(StatusCode::SWITCHING_PROTOCOLS);
    let headers = answer.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(PROTOCOL));
    answer
}

async fn connect(port: u16) -> std::io::Result<TcpStream> {
    let stream = match TcpStream::connect(("127.0.0.1", port)).await {
        Err(refused) => TcpStream::connect(("::1", port))
            .await
            .map_err(|_| refused)?,
        Ok(stream) => stream,
    };
    stream.set_nodelay(true)?;
    Ok(stream)
}
