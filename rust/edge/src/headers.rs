//! What a proxy changes in headers between two hops (pure).

use std::net::IpAddr;

use hyper::header::{
    HeaderMap, HeaderName, HeaderValue, CONNECTION, CONTENT_LENGTH, EXPECT, HOST,
    PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};
use hyper::Uri;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Meant for the next hop only, whether or not `Connection` lists them (RFC 9110 7.6.1).
const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// What stays of a request's hop-by-hop headers because our own next hop needs it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Kept {
    upgrade: Option<HeaderValue>,
    trailers: bool,
    chunked: bool,
}

/// Brings the request line into origin form; its authority becomes `Host` (RFC 9112 3.2.2).
pub fn to_origin_form(uri: &mut Uri, headers: &mut HeaderMap) {
    let Some(authority) = uri.authority() else {
        return;
    };
    if let Ok(host) = HeaderValue::from_str(authority.as_str()) {
        headers.insert(HOST, host);
    }
    let path = uri.path_and_query().cloned();
    *uri = path.map_or_else(|| Uri::from_static("/"), Uri::from);
}

/// Rewrites a request for the next hop; true if it asks for a protocol upgrade.
pub fn request(headers: &mut HeaderMap, peer: IpAddr, secure: bool) -> bool {
    let kept = Kept {
        upgrade: upgrade(headers).cloned(),
        trailers: lists(headers, &TE, "trailers"),
        chunked: headers.contains_key(TRANSFER_ENCODING),
    };
    strip(headers);
    headers.remove(EXPECT); // the client was told to continue by us
    forwarded(headers, peer, if secure { "https" } else { "http" });
    restore(headers, kept)
}

/// Rewrites a response that came from the next hop; `switching` keeps the upgrade of a 101.
pub fn response(headers: &mut HeaderMap, switching: bool) {
    if !headers.contains_key(CONNECTION) && !headers.contains_key(TRANSFER_ENCODING) {
        // The common case: nothing but names that are hop-by-hop by themselves.
        return HOP_BY_HOP
            .iter()
            .for_each(|name| drop(headers.remove(name)));
    }
    let kept = Kept {
        upgrade: upgrade(headers).cloned().filter(|_| switching),
        ..Kept::default()
    };
    strip(headers);
    restore(headers, kept);
}

/// Replaces `Host`, as `maskRequestHost` asks for; the original goes on as forwarded host.
pub fn mask_host(headers: &mut HeaderMap, mask: &str, port: u16) {
    let host = mask.replace("${PORT}", &port.to_string());
    if let Ok(value) = HeaderValue::from_str(&host) {
        if let Some(asked) = headers.insert(HOST, value) {
            headers.entry(FORWARDED_HOST).or_insert(asked);
        }
    }
}

/// The protocol asked for, except h2c, which would take the connection out of our hands.
fn upgrade(headers: &HeaderMap) -> Option<&HeaderValue> {
    let value = headers.get(UPGRADE)?;
    let wanted = lists(headers, &CONNECTION, "upgrade") && !value.as_bytes().starts_with(b"h2c");
    wanted.then_some(value)
}

fn strip(headers: &mut HeaderMap) {
    for name in listed(headers) {
        headers.remove(name);
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}

/// The names that `Connection` declares hop-by-hop, but never those that frame or address.
fn listed(headers: &HeaderMap) -> Vec<HeaderName> {
    tokens(headers, &CONNECTION)
        .filter_map(|token| HeaderName::from_bytes(token.as_bytes()).ok())
        .filter(|name| name != HOST && name != CONTENT_LENGTH)
        .collect()
}

fn restore(headers: &mut HeaderMap, kept: Kept) -> bool {
    if kept.chunked {
        // Else hyper sends a GET with a chunked body as one without.
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        headers.remove(CONTENT_LENGTH);
    }
    if kept.trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    let Some(protocol) = kept.upgrade else {
        return false;
    };
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol);
    true
}

/// Appends the peer to the chain of addresses; host and scheme as the first proxy saw them.
fn forwarded(headers: &mut HeaderMap, peer: IpAddr, scheme: &'static str) {
    let chain = match headers.get(FORWARDED_FOR).and_then(|v| v.to_str().ok()) {
        Some(earlier) => format!("{earlier}, {peer}"),
        None => peer.to_string(),
    };
    if let Ok(value) = HeaderValue::from_str(&chain) {
        headers.insert(FORWARDED_FOR, value);
    }
    if let Some(host) = headers.get(HOST).cloned() {
        headers.entry(FORWARDED_HOST).or_insert(host);
    }
    headers
        .entry(FORWARDED_PROTO)
        .or_insert(HeaderValue::from_static(scheme));
}

fn lists(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    tokens(headers, name).any(|found| found.eq_ignore_ascii_case(token))
}

fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    headers
        .get_all(name)
        .into_iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7));

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )
        });
        pairs.collect()
    }

    fn value<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
        headers.get(name).and_then(|v| v.to_str().ok())
    }

    #[test]
    fn hop_by_hop_headers_and_those_listed_go() {
        let mut headers = map(&[
            ("connection", "keep-alive, X-Secret , te"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "keep-alive"),
            ("proxy-authorization", "Basic eDp5"),
            ("te", "gzip"),
            ("x-secret", "1"),
            ("expect", "100-continue"),
            ("x-kept", "1"),
        ]);
        assert!(!request(&mut headers, PEER, false));
        let names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        assert_eq!(names.len(), 3, "{names:?}");
        assert_eq!(value(&headers, "x-kept"), Some("1"));
    }

    #[test]
    fn connection_cannot_take_away_host_or_length() {
        let mut headers = map(&[
            ("connection", "host, content-length"),
            ("host", "a"),
            ("content-length", "3"),
        ]);
        request(&mut headers, PEER, false);
        assert_eq!(value(&headers, "host"), Some("a"));
        assert_eq!(value(&headers, "content-length"), Some("3"));
    }

    #[test]
    fn a_chunked_request_stays_chunked() {
        let mut headers = map(&[("transfer-encoding", "Chunked"), ("content-length", "3")]);
        request(&mut headers, PEER, false);
        assert_eq!(value(&headers, "transfer-encoding"), Some("chunked"));
        assert_eq!(value(&headers, "content-length"), None);
    }

    #[test]
    fn an_upgrade_passes_unless_it_is_h2c_or_unlisted() {
        let mut websocket = map(&[
            ("connection", "Keep-Alive, Upgrade"),
            ("upgrade", "websocket"),
        ]);
        assert!(request(&mut websocket, PEER, false));
        assert_eq!(value(&websocket, "connection"), Some("upgrade"));
        assert_eq!(value(&websocket, "upgrade"), Some("websocket"));
        let mut h2c = map(&[("connection", "upgrade"), ("upgrade", "h2c")]);
        assert!(!request(&mut h2c, PEER, false));
        let mut unlisted = map(&[("upgrade", "websocket")]);
        assert!(!request(&mut unlisted, PEER, false));
        assert_eq!(value(&unlisted, "upgrade"), None);
    }

    #[test]
    fn trailers_are_still_accepted_if_the_client_accepts_them() {
        let mut headers = map(&[("te", "gzip, trailers")]);
        request(&mut headers, PEER, false);
        assert_eq!(value(&headers, "te"), Some("trailers"));
    }

    #[test]
    fn the_chain_of_addresses_grows_and_the_first_host_stays() {
        let mut first = map(&[("host", "80-x.example.org")]);
        request(&mut first, PEER, false);
        assert_eq!(value(&first, "x-forwarded-for"), Some("192.0.2.7"));
        assert_eq!(value(&first, "x-forwarded-host"), Some("80-x.example.org"));
        assert_eq!(value(&first, "x-forwarded-proto"), Some("http"));
        let mut second = map(&[
            ("host", "a"),
            ("x-forwarded-for", "198.51.100.1"),
            ("x-forwarded-host", "b"),
            ("x-forwarded-proto", "https"),
        ]);
        request(&mut second, PEER, false);
        assert_eq!(
            value(&second, "x-forwarded-for"),
            Some("198.51.100.1, 192.0.2.7")
        );
        assert_eq!(value(&second, "x-forwarded-host"), Some("b"));
        assert_eq!(value(&second, "x-forwarded-proto"), Some("https"));
    }

    #[test]
    fn a_request_over_tls_came_by_https() {
        let mut headers = HeaderMap::new();
        request(&mut headers, PEER, true);
        assert_eq!(value(&headers, "x-forwarded-proto"), Some("https"));
    }

    #[test]
    fn a_response_loses_its_hop_but_a_switch_keeps_its_protocol() {
        let mut plain = map(&[
            ("connection", "close, x-hop"),
            ("transfer-encoding", "chunked"),
            ("x-hop", "1"),
            ("upgrade", "h2"),
            ("content-type", "a/b"),
        ]);
        response(&mut plain, false);
        assert_eq!(plain, map(&[("content-type", "a/b")]));
        let mut switch = map(&[("connection", "Upgrade"), ("upgrade", "websocket")]);
        response(&mut switch, true);
        assert_eq!(value(&switch, "upgrade"), Some("websocket"));
        let mut short = map(&[("keep-alive", "timeout=5"), ("content-length", "0")]);
        response(&mut short, false);
        assert_eq!(short, map(&[("content-length", "0")]));
    }

    #[test]
    fn an_absolute_target_wins_over_host() {
        let mut uri: Uri = "http://8080-x.example.org/a?b=c"
            .parse()
            .expect("a legal uri");
        let mut headers = map(&[("host", "other")]);
        to_origin_form(&mut uri, &mut headers);
        assert_eq!(uri, "/a?b=c");
        assert_eq!(value(&headers, "host"), Some("8080-x.example.org"));
    }

    #[test]
    fn a_masked_host_takes_the_port() {
        let mut headers = map(&[("host", "a")]);
        mask_host(&mut headers, "localhost:${PORT}", 3000);
        assert_eq!(value(&headers, "host"), Some("localhost:3000"));
        assert_eq!(value(&headers, "x-forwarded-host"), Some("a"));
    }
}
