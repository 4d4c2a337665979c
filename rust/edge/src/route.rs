//! Whom a request is for, decided from its head alone (pure).

use std::fmt;

use hyper::header::{HeaderMap, HeaderName, HOST};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The port of the guest agent (E2B's envd).
pub const AGENT_PORT: u16 = 49983;

pub const SANDBOX_ID: HeaderName = HeaderName::from_static("e2b-sandbox-id");
pub const SANDBOX_PORT: HeaderName = HeaderName::from_static("e2b-sandbox-port");

/// Paths of the agent that only the host may use.
const INTERNAL: [&str; 6] = [
    "init", "freeze", "unfreeze", "collapse", "fsfreeze", "fsthaw",
];

/// 20 characters `[a-z0-9]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SandboxId([u8; 20]);

impl SandboxId {
    pub fn parse(text: &str) -> Option<Self> {
        let bytes: [u8; 20] = text.as_bytes().try_into().ok()?;
        let legal = bytes
            .iter()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        legal.then_some(Self(bytes))
    }

    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default() // always ASCII, see parse
    }
}

impl<'de> Deserialize<'de> for SandboxId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let wrong = || D::Error::custom("a sandbox id has 20 characters [a-z0-9]");
        Self::parse(&text).ok_or_else(wrong)
    }
}

impl Serialize for SandboxId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl fmt::Debug for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Where a request goes.
#[derive(Debug, PartialEq, Eq)]
pub enum Target {
    Api,
    Guest {
        id: SandboxId,
        port: u16,
    },
    /// It names a sandbox by something that cannot be an id, so it names none that exists.
    Nobody(String),
}

/// The request names a sandbox, but no port that can be meant.
#[derive(Debug, PartialEq, Eq)]
pub struct BadPort(pub String);

/// Headers decide before the host name; what names no sandbox is for the API server.
///
/// The target of the request line must be in origin form, its authority already in `Host`.
pub fn target(headers: &HeaderMap) -> Result<Target, BadPort> {
    match headers.get(SANDBOX_ID) {
        Some(id) => {
            let port = port_of(headers)?;
            Ok(match id.to_str().ok().and_then(SandboxId::parse) {
                Some(id) => Target::Guest { id, port },
                None => Target::Nobody(String::from_utf8_lossy(id.as_bytes()).into_owned()),
            })
        }
        None => {
            let host = headers.get(HOST).and_then(|host| host.to_str().ok());
            Ok(host.map_or(Target::Api, by_host))
        }
    }
}

fn port_of(headers: &HeaderMap) -> Result<u16, BadPort> {
    let Some(value) = headers.get(SANDBOX_PORT) else {
        return Ok(AGENT_PORT);
    };
    value
        .to_str()
        .ok()
        .and_then(parse_port)
        .ok_or_else(|| BadPort(String::from_utf8_lossy(value.as_bytes()).into_owned()))
}

/// `{port}-{id}` as the first label; anything else is not a sandbox's name.
fn by_host(host: &str) -> Target {
    let label = host.split(['.', ':']).next().unwrap_or_default();
    let parsed = label.split_once('-').and_then(|(port, id)| {
        let id = SandboxId::parse(&id.to_ascii_lowercase())?;
        Some((id, parse_port(port)?))
    });
    parsed.map_or(Target::Api, |(id, port)| Target::Guest { id, port })
}

fn parse_port(text: &str) -> Option<u16> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let port = digits.then(|| text.parse().ok()).flatten()?;
    (port != 0).then_some(port)
}

/// Whether a path leads to one of the agent's internal endpoints, however it is spelled.
pub fn is_internal(path: &str) -> bool {
    let decoded = percent_decoded(path);
    let mut segments = Vec::new();
    for segment in decoded.split('/') {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            _ => segments.push(segment),
        }
    }
    matches!(segments[..], [only] if INTERNAL.iter().any(|p| only.eq_ignore_ascii_case(p)))
}

pub fn percent_decoded(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let decoded = (byte == b'%').then(|| hex_pair(tail)).flatten();
        out.push(decoded.unwrap_or(byte));
        rest = if decoded.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn hex_pair(bytes: &[u8]) -> Option<u8> {
    let digit = |b: u8| (b as char).to_digit(16);
    let (high, low) = (digit(*bytes.first()?)?, digit(*bytes.get(1)?)?);
    u8::try_from(high * 16 + low).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;

    const ID: &str = "abcd0123456789efghij";

    fn guest(port: u16) -> Result<Target, BadPort> {
        let id = SandboxId::parse(ID).expect("a legal id");
        Ok(Target::Guest { id, port })
    }

    fn ask(pairs: &[(&'static str, &str)]) -> Result<Target, BadPort> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_str(value).expect("a legal value"));
        }
        target(&headers)
    }

    #[test]
    fn headers_name_the_sandbox_and_the_port() {
        assert_eq!(ask(&[("e2b-sandbox-id", ID)]), guest(AGENT_PORT));
        let both = [("e2b-sandbox-id", ID), ("e2b-sandbox-port", "3000")];
        assert_eq!(ask(&both), guest(3000));
    }

    #[test]
    fn headers_win_over_the_host_name() {
        let other = "80-zzzzzzzzzzzzzzzzzzzz.example.org";
        assert_eq!(
            ask(&[("host", other), ("e2b-sandbox-id", ID)]),
            guest(AGENT_PORT)
        );
    }

    #[test]
    fn the_first_label_names_port_and_sandbox() {
        for host in [
            format!("8080-{ID}.example.org"),
            format!("8080-{ID}.example.org:8000"),
            format!("8080-{ID}:8000"),
            format!("8080-{}.Example.ORG", ID.to_uppercase()),
        ] {
            assert_eq!(ask(&[("host", &host)]), guest(8080), "{host}");
        }
    }

    #[test]
    fn everything_else_is_for_the_api() {
        for host in [
            "localhost:8000".to_owned(),
            "api.example.org".to_owned(),
            format!("{ID}.example.org"),
            format!("-{ID}.example.org"),
            format!("0-{ID}.example.org"),
            format!("+80-{ID}.example.org"),
            format!("65536-{ID}.example.org"),
            format!("80-{ID}x.example.org"),
            format!("x.80-{ID}.example.org"),
        ] {
            assert_eq!(ask(&[("host", &host)]), Ok(Target::Api), "{host}");
        }
        assert_eq!(ask(&[]), Ok(Target::Api));
    }

    #[test]
    fn an_impossible_id_names_nobody() {
        let expected = Ok(Target::Nobody("debug_sandbox_id".to_owned()));
        assert_eq!(ask(&[("e2b-sandbox-id", "debug_sandbox_id")]), expected);
    }

    #[test]
    fn a_port_that_cannot_be_is_refused() {
        for port in ["", "0", "65536", "-1", "+80", "8o"] {
            let pairs = [("e2b-sandbox-id", ID), ("e2b-sandbox-port", port)];
            assert_eq!(ask(&pairs), Err(BadPort(port.to_owned())), "{port}");
        }
    }

    #[test]
    fn internal_paths_are_known_in_every_spelling() {
        for path in [
            "/init",
            "/init/",
            "//init",
            "/./init",
            "/a/../init",
            "/%69nit",
            "/INIT",
            "/%2finit",
            "/freeze",
            "/unfreeze",
            "/collapse",
            "/fsfreeze",
            "/fsthaw",
        ] {
            assert!(is_internal(path), "{path}");
        }
        for path in [
            "/", "/health", "/files", "/init/x", "/initial", "/%zzinit", "/x/init",
        ] {
            assert!(!is_internal(path), "{path}");
        }
    }
}
