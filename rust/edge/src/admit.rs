//! Whether a request may pass, or wake the one it is for. What is refused wakes nobody.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use hyper::header::{HeaderMap, HeaderName, ACCESS_CONTROL_REQUEST_METHOD, ORIGIN};
use hyper::http::request::Parts;
use hyper::Method;

use crate::answer::Answer;
use crate::headers;
use crate::route::{self, SandboxId, Target, AGENT_PORT};
use crate::secret::Secret;
use crate::signed::Claim;
use crate::spec::Policy;
use crate::table::{Route, Table, Way};
use crate::upstream::{Api, Upstream};
use crate::wake::Sleep;

const TRAFFIC_TOKEN: HeaderName = HeaderName::from_static("e2b-traffic-access-token");
const ACCESS_TOKEN: HeaderName = HeaderName::from_static("x-access-token");

#[derive(Debug)]
pub enum Admission {
    Pass(Upstream),
    /// To be asked for again once the sandbox is awake.
    Wake(Arc<Sleep>),
}

/// Finds the upstream and, if the request may pass now, adapts it. May be repeated.
pub fn admit(table: &Table, api: &Arc<Api>, head: &mut Parts) -> Result<Admission, Answer> {
    if head.method == Method::CONNECT {
        return Err(Answer::NoTunnels);
    }
    headers::to_origin_form(&mut head.uri, &mut head.headers);
    match route::target(&head.headers) {
        Ok(Target::Api) => admit_unnamed(table, api, head),
        Ok(Target::Guest { id, port }) => match table.get(&id) {
            Some(route) => admit_to_guest(&route, port, head),
            None => Err(unknown(table, id.as_str().to_owned())),
        },
        Ok(Target::Nobody(id)) => Err(unknown(table, id)),
        Err(route::BadPort(port)) => Err(Answer::BadPort { port }),
    }
}

fn unknown(table: &Table, id: String) -> Answer {
    if table.knows_all() {
        Answer::NotFound { id }
    } else {
        Answer::NotSynced
    }
}

/// For the API, unless it is a signed URL of a file: that is for the sandbox that signed it.
fn admit_unnamed(table: &Table, api: &Arc<Api>, head: &mut Parts) -> Result<Admission, Answer> {
    let Some(claim) = Claim::of(&head.method, &head.uri) else {
        return Ok(Admission::Pass(Upstream::Api(Arc::clone(api))));
    };
    match table.find_by_token(|token| claim.is_signed_with(token)) {
        Some(route) => admit_to_guest(&route, AGENT_PORT, head),
        None if table.knows_all() => Err(INVALID_SIGNATURE),
        None => Err(Answer::NotSynced),
    }
}

fn admit_to_guest(route: &Route, port: u16, head: &mut Parts) -> Result<Admission, Answer> {
    let id = route.id();
    match &route.way {
        Way::Open(link) => {
            may_pass(&route.policy, id, port, head)?;
            if port != AGENT_PORT {
                adapt(&route.policy, port, &mut head.headers);
            }
            Ok(Admission::Pass(Upstream::guest(link, port)))
        }
        Way::Asleep(sleep) if sleep.wakes => {
            may_pass(&route.policy, id, port, head)?;
            may_wake(&route.policy, id, port, head)?;
            Ok(Admission::Wake(Arc::clone(sleep)))
        }
        Way::Asleep(_) => Err(not_found(id)),
    }
}

pub fn not_found(id: SandboxId) -> Answer {
    Answer::NotFound {
        id: id.as_str().to_owned(),
    }
}

fn may_pass(policy: &Policy, id: SandboxId, port: u16, head: &Parts) -> Result<(), Answer> {
    let path = head.uri.path();
    if port != AGENT_PORT && !shows_token(policy, &head.headers) {
        let id = id.as_str().to_owned();
        return Err(Answer::TokenNeeded { id, port });
    }
    if port == AGENT_PORT && route::is_internal(path) {
        let path = path.to_owned();
        return Err(Answer::Internal { path });
    }
    Ok(())
}

/// Whether it shows the traffic token of a sandbox that is not public.
fn shows_token(policy: &Policy, headers: &HeaderMap) -> bool {
    let right = |token: &Secret| {
        let shown = headers.get(TRAFFIC_TOKEN);
        shown.is_some_and(|shown| token.is(shown.as_bytes()))
    };
    policy.public || policy.traffic_token.as_ref().is_some_and(right)
}

/// What the guest gets to see: another host if it is masked, and never the traffic token.
fn adapt(policy: &Policy, port: u16, headers: &mut HeaderMap) {
    headers.remove(TRAFFIC_TOKEN);
    if let Some(mask) = &policy.mask_host {
        headers::mask_host(headers, mask, port);
    }
}

/// What only looks does not wake, nor what the agent would refuse.
fn may_wake(policy: &Policy, id: SandboxId, port: u16, head: &Parts) -> Result<(), Answer> {
    if only_looks(port, head) {
        return Err(not_found(id));
    }
    match &policy.access_token {
        Some(token) if port == AGENT_PORT => opens_agent(token, head),
        _ => Ok(()),
    }
}

/// SDKs ask for the agent's health to learn whether a sandbox runs; browsers ask before they send.
fn only_looks(port: u16, head: &Parts) -> bool {
    let reads = head.method == Method::GET || head.method == Method::HEAD;
    let health = reads && port == AGENT_PORT && head.uri.path() == "/health";
    let headers = &head.headers;
    let preflight = head.method == Method::OPTIONS
        && headers.contains_key(ORIGIN)
        && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    health || preflight
}

const INVALID_SIGNATURE: Answer = Answer::Unauthorized {
    why: "invalid signature",
};

/// The agent's rule and words: its token in a header, or a signed URL of a file.
fn opens_agent(token: &Secret, head: &Parts) -> Result<(), Answer> {
    let refused = |why| Err(Answer::Unauthorized { why });
    if let Some(shown) = head.headers.get(ACCESS_TOKEN) {
        if token.is(shown.as_bytes()) {
            return Ok(());
        }
        return refused("the access token is not this sandbox's");
    }
    let Some(claim) = Claim::of(&head.method, &head.uri) else {
        return refused("the X-Access-Token header is missing");
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    if !claim.is_signed_with(token) {
        Err(INVALID_SIGNATURE)
    } else if claim.is_expired(now.map_or(0, |d| d.as_secs())) {
        refused("signature is already expired")
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;
    use hyper::Request;

    const ID: &str = "abcd0123456789efghij";

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
        let passed = shows_token(policy, &headers);
        adapt(policy, 80, &mut headers);
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

    fn asked(method: Method, path: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).expect("a legal request").into_parts().0
    }

    /// The status with which a sleeping sandbox answers; None: the request wakes it.
    fn asleep(wakes: bool, policy: Policy, port: u16, mut head: Parts) -> Option<u16> {
        let id = SandboxId::parse(ID).expect("a legal id");
        let sleep = Arc::new(Sleep::new(id, wakes, Arc::default()));
        let way = Way::Asleep(sleep);
        match admit_to_guest(&Route { policy, way }, port, &mut head) {
            Ok(Admission::Wake(_)) => None,
            Ok(Admission::Pass(upstream)) => panic!("passed to {upstream:?}"),
            Err(answer) => Some(answer.status().as_u16()),
        }
    }

    #[test]
    fn one_that_does_not_wake_is_not_found_whoever_asks() {
        for (policy, path) in [
            (policy(true, None), "/"),
            (policy(false, Some("t")), "/"),
            (policy(true, None), "/init"),
        ] {
            let head = asked(Method::GET, path, &[]);
            assert_eq!(asleep(false, policy, AGENT_PORT, head), Some(502), "{path}");
        }
    }

    #[test]
    fn what_is_refused_or_only_looks_does_not_wake() {
        let preflight = [
            ("origin", "http://a"),
            ("access-control-request-method", "PUT"),
        ];
        for (port, method, path, headers, status) in [
            (80, Method::GET, "/", &[][..], None),
            (80, Method::GET, "/health", &[], None),
            (80, Method::OPTIONS, "/", &[("origin", "http://a")], None),
            (80, Method::OPTIONS, "/", &preflight, Some(502)),
            (AGENT_PORT, Method::GET, "/health", &[], Some(502)),
            (AGENT_PORT, Method::POST, "/health", &[], None),
            (AGENT_PORT, Method::GET, "/init", &[], Some(403)),
            (AGENT_PORT, Method::GET, "/files", &[], None),
        ] {
            let head = asked(method, path, headers);
            assert_eq!(
                asleep(true, policy(true, None), port, head),
                status,
                "{port}{path}"
            );
        }
        let private = || policy(false, Some("t"));
        let right = [("e2b-traffic-access-token", "t")];
        assert_eq!(
            asleep(true, private(), 80, asked(Method::GET, "/", &[])),
            Some(403)
        );
        assert_eq!(
            asleep(true, private(), 80, asked(Method::GET, "/", &right)),
            None
        );
        let agent = asked(Method::POST, "/x", &[]);
        assert_eq!(asleep(true, private(), AGENT_PORT, agent), None);
    }

    #[test]
    fn what_the_agent_would_refuse_does_not_wake() {
        // Signed with "tok", see signed.rs; the second until long ago.
        let read = "/files?path=a.txt&signature=v1_gDv73H8R9a10OdCSX0%2FJNMqMYLPpmCQAYJY%2BU68oQjM";
        let expired = "/files?username=some+user&path=%2Fhome%2F%C3%BC+b%2Bc\
            &signature=v1_rCzR%2BuIJkWJf%2FnimyCfGyp0j690v0QJh3Zt0bTIJyfk\
            &signature_expiration=1700000000";
        for (method, path, token, status) in [
            (Method::POST, "/x", Some("tok"), None),
            (Method::POST, "/x", Some("guess"), Some(401)),
            (Method::POST, "/x", None, Some(401)),
            (Method::GET, read, None, None),
            (Method::GET, read, Some("guess"), Some(401)),
            (Method::POST, read, None, Some(401)),
            (Method::POST, expired, None, Some(401)),
        ] {
            let secure = Policy {
                access_token: Some(Secret::from("tok")),
                ..policy(true, None)
            };
            let shown = token.map(|token| ("x-access-token", token));
            let head = asked(method, path, shown.as_slice());
            assert_eq!(asleep(true, secure, AGENT_PORT, head), status, "{path}");
        }
    }
}
