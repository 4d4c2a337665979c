//! What HTTP/2 says in its own way, said in that of HTTP/1.1 and back (pure).

use hyper::header::{
    HeaderMap, HeaderValue, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, HOST, TRANSFER_ENCODING,
};
use hyper::http::uri::{Authority, PathAndQuery, Scheme};
use hyper::Uri;

/// Makes one of a cookie's crumbs (RFC 9113 8.2.3), and chunks of a body without length.
pub fn to_http1(headers: &mut HeaderMap, chunked: bool) {
    let crumbs: Vec<&[u8]> = headers
        .get_all(COOKIE)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect();
    if let (2.., Ok(whole)) = (
        crumbs.len(),
        HeaderValue::from_bytes(&crumbs.join(&b"; "[..])),
    ) {
        headers.insert(COOKIE, whole);
    }
    if chunked && !headers.contains_key(CONTENT_LENGTH) {
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
}

/// Brings the request line into the form with scheme and host, which HTTP/2 sends as such.
pub fn to_absolute_form(uri: &mut Uri, headers: &mut HeaderMap) {
    let mut parts = std::mem::take(uri).into_parts();
    let host = headers.remove(HOST);
    parts.scheme = Some(Scheme::HTTP);
    parts.authority = host.and_then(|host| Authority::try_from(host.as_bytes()).ok());
    parts
        .authority
        .get_or_insert(Authority::from_static("localhost"));
    parts
        .path_and_query
        .get_or_insert(PathAndQuery::from_static("/"));
    *uri = Uri::from_parts(parts).unwrap_or_default(); // all three are there
}

/// Whether it is gRPC itself, which its web form over HTTP/1.1 is not.
pub fn is_grpc(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let rest = kind.and_then(|kind| kind.strip_prefix(b"application/grpc"));
    rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';' | b' ')))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderName;

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )
        });
        pairs.collect()
    }

    #[test]
    fn cookie_crumbs_become_one_cookie() {
        let mut headers = map(&[("cookie", "a=1"), ("cookie", "b=2"), ("cookie", "c=3")]);
        to_http1(&mut headers, false);
        assert_eq!(headers, map(&[("cookie", "a=1; b=2; c=3")]));
        let mut whole = map(&[("cookie", "a=1; b=2")]);
        to_http1(&mut whole, false);
        assert_eq!(whole, map(&[("cookie", "a=1; b=2")]));
    }

    #[test]
    fn a_body_that_ends_with_its_stream_is_chunked_unless_its_length_is_known() {
        let chunked = map(&[("transfer-encoding", "chunked")]);
        let known = map(&[("content-length", "3")]);
        for (before, wanted, after) in [
            (HeaderMap::new(), true, chunked),
            (HeaderMap::new(), false, HeaderMap::new()),
            (known.clone(), true, known),
        ] {
            let mut headers = before;
            to_http1(&mut headers, wanted);
            assert_eq!(headers, after);
        }
    }

    #[test]
    fn for_http2_the_host_goes_into_the_target() {
        let (mut uri, mut headers) = (Uri::from_static("/a?b=c"), map(&[("host", "x:80")]));
        to_absolute_form(&mut uri, &mut headers);
        assert_eq!(
            (uri, headers.len()),
            (Uri::from_static("http://x:80/a?b=c"), 0)
        );
        let (mut uri, mut headers) = (Uri::from_static("/"), map(&[("host", "a b")]));
        to_absolute_form(&mut uri, &mut headers);
        assert_eq!(uri, Uri::from_static("http://localhost/"));
    }

    #[test]
    fn grpc_is_told_from_its_web_form() {
        for kind in [
            "application/grpc",
            "application/grpc+proto",
            "application/grpc;x=y",
        ] {
            assert!(is_grpc(&map(&[("content-type", kind)])), "{kind}");
        }
        for kind in [
            "application/grpc-web",
            "application/grpc-web+proto",
            "application/json",
        ] {
            assert!(!is_grpc(&map(&[("content-type", kind)])), "{kind}");
        }
    }
}
