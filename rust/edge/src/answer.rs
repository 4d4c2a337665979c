//! The answers that the edge gives by itself. SDKs match on these texts: E2B.md 2.1.

use bytes::Bytes;
use hyper::header::{HeaderName, HeaderValue, CONTENT_TYPE, RETRY_AFTER};
use hyper::{Response, StatusCode};
use serde_json::{json, Value};

use crate::body::Reply;

const SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");

/// Why a request was not passed on, or not answered by the one it was meant for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    NotFound {
        id: String,
    },
    PortClosed {
        id: String,
        port: u16,
    },
    Unreachable {
        id: String,
        port: u16,
        why: String,
    },
    Broken {
        id: String,
        port: u16,
        why: String,
    },
    Internal {
        path: String,
    },
    TokenNeeded {
        id: String,
        port: u16,
    },
    BadPort {
        port: String,
    },
    /// A signed URL that no sandbox's token signed, or what would not open the agent.
    Unauthorized {
        why: &'static str,
    },
    /// The server could not wake the sandbox.
    WakeFailed {
        id: String,
        why: String,
    },
    WakeTimeout {
        id: String,
        seconds: u64,
    },
    /// This process ends, and another takes over: nobody will let go what is held here.
    Draining,
    NoTunnels,
    /// No truth about sandboxes has reached this process yet.
    NotSynced,
    ApiAway,
    ApiBroken {
        why: String,
    },
}

impl Answer {
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NotFound { .. }
            | Self::PortClosed { .. }
            | Self::Unreachable { .. }
            | Self::Broken { .. }
            | Self::WakeFailed { .. }
            | Self::ApiBroken { .. } => StatusCode::BAD_GATEWAY,
            Self::Internal { .. } | Self::TokenNeeded { .. } => StatusCode::FORBIDDEN,
            Self::BadPort { .. } => StatusCode::BAD_REQUEST,
            Self::Unauthorized { .. } => StatusCode::UNAUTHORIZED,
            Self::WakeTimeout { .. } => StatusCode::GATEWAY_TIMEOUT,
            Self::NoTunnels => StatusCode::METHOD_NOT_ALLOWED,
            Self::NotSynced | Self::ApiAway | Self::Draining => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Whether an SDK may send the request again on its own, which obeys: yes, if nothing was sent
    /// and it will go better soon; no, if it may have had effects.
    fn should_retry(&self) -> Option<bool> {
        match self {
            Self::NotSynced | Self::ApiAway | Self::Draining => Some(true),
            Self::Broken { .. } | Self::ApiBroken { .. } => Some(false),
            _ => None,
        }
    }

    pub fn body(&self) -> Value {
        let code = self.status().as_u16();
        match self {
            Self::NotFound { id } => of(id, code, "The sandbox was not found"),
            Self::WakeFailed { id, why } => of(
                id,
                code,
                &format!("The sandbox is paused and could not be resumed: {why}"),
            ),
            Self::WakeTimeout { id, seconds } => of(
                id,
                code,
                &format!("The sandbox is paused and was not resumed within {seconds} s"),
            ),
            Self::PortClosed { id, port } => about(
                id,
                *port,
                code,
                "The sandbox is running but port is not open",
            ),
            Self::Unreachable { id, port, why } => about(
                id,
                *port,
                code,
                &format!("The sandbox cannot be reached: {why}"),
            ),
            Self::Broken { id, port, why } => about(
                id,
                *port,
                code,
                &format!("The server in the sandbox broke the connection off: {why}"),
            ),
            Self::TokenNeeded { id, port } => about(
                id,
                *port,
                code,
                "The sandbox is not public: send its token in the header e2b-traffic-access-token",
            ),
            Self::Internal { path } => plain(code, &format!("{path} is internal to the sandbox")),
            Self::BadPort { port } => plain(
                code,
                &format!("E2b-Sandbox-Port is not a port (1 to 65535): {port:?}"),
            ),
            Self::Unauthorized { why } => plain(code, why),
            Self::Draining => plain(code, "The data plane is restarting"),
            Self::NoTunnels => plain(code, "CONNECT is not offered here"),
            Self::NotSynced => plain(
                code,
                "The node is starting and does not know its sandboxes yet",
            ),
            Self::ApiAway => plain(code, "The API server is not running or just restarting"),
            Self::ApiBroken { why } => plain(
                code,
                &format!("The API server broke the connection off: {why}"),
            ),
        }
    }

    pub fn response(&self) -> Response<Reply> {
        let body = Bytes::from(self.body().to_string());
        let mut response = Response::new(Reply::whole(body));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self.should_retry() {
            Some(true) => {
                headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
                headers.insert(SHOULD_RETRY, HeaderValue::from_static("true"));
            }
            Some(false) => drop(headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"))),
            None => {}
        }
        response
    }
}

fn about(id: &str, port: u16, code: u16, message: &str) -> Value {
    json!({"sandboxId": id, "port": port, "message": message, "code": code})
}

fn of(id: &str, code: u16, message: &str) -> Value {
    json!({"sandboxId": id, "message": message, "code": code})
}

fn plain(code: u16, message: &str) -> Value {
    json!({"code": code, "message": message})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_that_sdks_match_are_exact() {
        let gone = Answer::NotFound { id: "x".to_owned() };
        let expected =
            json!({"sandboxId": "x", "message": "The sandbox was not found", "code": 502});
        assert_eq!(gone.body(), expected);
        let closed = Answer::PortClosed {
            id: "x".to_owned(),
            port: 80,
        };
        let message = "The sandbox is running but port is not open";
        let expected = json!({"sandboxId": "x", "port": 80, "message": message, "code": 502});
        assert_eq!(closed.body(), expected);
    }

    #[test]
    fn a_sandbox_that_could_not_be_woken_says_why() {
        let (id, why) = ("x".to_owned(), "no room".to_owned());
        let failed = Answer::WakeFailed { id, why };
        let message = "The sandbox is paused and could not be resumed: no room";
        let expected = json!({"sandboxId": "x", "message": message, "code": 502});
        assert_eq!(failed.body(), expected);
        let id = "x".to_owned();
        let late = Answer::WakeTimeout { id, seconds: 60 };
        assert_eq!(late.body()["code"], 504);
    }

    #[test]
    fn only_what_was_not_sent_may_be_retried() {
        let away = Answer::ApiAway.response();
        assert_eq!(away.status(), 503);
        assert_eq!(away.headers()["should-retry"], "true");
        assert_eq!(away.headers()["retry-after"], "1");
        let broken = Answer::ApiBroken { why: String::new() }.response();
        assert_eq!(broken.headers()["should-retry"], "false");
    }
}
