//! Signed URLs of files. They may name no sandbox; the token that signed them tells whose they are
//! (pure). The rule is the agent's and the SDKs': E2B.md 2.2.

use base64::prelude::{Engine as _, BASE64_STANDARD_NO_PAD};
use hyper::{Method, Uri};
use sha2::{Digest, Sha256};

use crate::route::percent_decoded;
use crate::secret::{same, Secret};

/// A signature and what it signs, but for the token.
pub struct Claim {
    /// Of `path:operation:user:`, which is the same for every sandbox.
    begun: Sha256,
    until: Option<String>,
    /// None: no signature can look like this.
    signature: Option<Vec<u8>>,
}

impl Claim {
    /// None: this is not a signed URL of a file.
    pub fn of(method: &Method, uri: &Uri) -> Option<Self> {
        let query = uri.query().filter(|_| uri.path() == "/files")?;
        let signature = value(query, "signature")?;
        let path = value(query, "path").unwrap_or_default();
        let user = value(query, "username").unwrap_or_default();
        let reading = method == Method::GET || method == Method::HEAD;
        let operation = if reading { "read" } else { "write" };
        Some(Self {
            begun: Sha256::new_with_prefix(format!("{path}:{operation}:{user}:")),
            until: value(query, "signature_expiration"),
            signature: decoded(&signature),
        })
    }

    /// Whether this token signed it, expired or not: the agent tells of that.
    pub fn is_signed_with(&self, token: &Secret) -> bool {
        let mut hash = self.begun.clone();
        hash.update(token.as_bytes());
        if let Some(until) = &self.until {
            hash.update(b":");
            hash.update(until);
        }
        let given = self.signature.as_deref();
        given.is_some_and(|given| same(given, &hash.finalize()))
    }

    /// Whether it was good until before `now` (Unix seconds) only.
    pub fn is_expired(&self, now: u64) -> bool {
        self.until.as_ref().is_some_and(|until| is_past(until, now))
    }
}

fn is_past(until: &str, now: u64) -> bool {
    until.parse().map_or(true, |until: u64| until < now)
}

fn decoded(signature: &str) -> Option<Vec<u8>> {
    let text = signature.strip_prefix("v1_")?;
    BASE64_STANDARD_NO_PAD.decode(text).ok()
}

fn value(query: &str, name: &str) -> Option<String> {
    query.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (key == name).then(|| percent_decoded(&value.replace('+', " ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(method: Method, uri: &str) -> Option<Claim> {
        Claim::of(&method, &uri.parse().expect("a legal uri"))
    }

    fn signed(method: Method, uri: &str) -> bool {
        let claim = claim(method, uri).expect("a signed URL");
        claim.is_signed_with(&Secret::from("tok"))
    }

    // sha256 of "a.txt:read::tok" and of "/home/ü b+c:write:some user:tok:1700000000".
    const READ: &str =
        "/files?path=a.txt&signature=v1_gDv73H8R9a10OdCSX0%2FJNMqMYLPpmCQAYJY%2BU68oQjM";
    const WRITE: &str = "/files?username=some+user&path=%2Fhome%2F%C3%BC+b%2Bc\
        &signature=v1_rCzR%2BuIJkWJf%2FnimyCfGyp0j690v0QJh3Zt0bTIJyfk&signature_expiration=1700000000";

    #[test]
    fn the_token_that_signed_is_known() {
        assert!(signed(Method::GET, READ) && signed(Method::HEAD, READ));
        assert!(signed(Method::POST, WRITE));
        let other = claim(Method::GET, READ).expect("a signed URL");
        assert!(!other.is_signed_with(&Secret::from("tok2")));
    }

    #[test]
    fn all_of_it_is_signed() {
        assert!(!signed(Method::POST, READ) && !signed(Method::GET, WRITE));
        for (what, other) in [("a.txt", "b.txt"), ("v1_", "v2_"), ("=v1_", "=v1_A")] {
            assert!(!signed(Method::GET, &READ.replace(what, other)), "{other}");
        }
        let (later, user) = (WRITE.replace("=17", "=18"), WRITE.replace("some", "other"));
        assert!(!signed(Method::POST, &later) && !signed(Method::POST, &user));
        assert!(!signed(Method::GET, &format!("{READ}=")), "no padding");
    }

    #[test]
    fn an_end_that_is_past_or_none_at_all_has_expired() {
        let until = claim(Method::POST, WRITE).expect("a signed URL");
        assert!(!until.is_expired(1_700_000_000) && until.is_expired(1_700_000_001));
        let never = claim(Method::GET, READ).expect("a signed URL");
        assert!(!never.is_expired(u64::MAX));
        assert!(is_past("soon", 0));
    }

    #[test]
    fn all_else_is_no_claim() {
        for uri in [
            "/files",
            "/files?path=a",
            "/files/?signature=v1_x",
            "/x?signature=v1_x",
            "/files?xsignature=v1_x",
        ] {
            assert!(claim(Method::GET, uri).is_none(), "{uri}");
        }
    }
}
