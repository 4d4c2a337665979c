//! Names: `localhost` and all below it are this machine (RFC 6761), which the C library does not
//! know of `bucket.localhost`; the rest is asked of the system.

use std::net::{IpAddr, Ipv4Addr};

use object_store::client::{DnsFuture, DnsResolver};

#[derive(Debug)]
pub(super) struct Resolver;

impl DnsResolver for Resolver {
    fn resolve(&self, host: &str) -> DnsFuture {
        let host = host.to_owned();
        Box::pin(async move {
            if host == "localhost" || host.ends_with(".localhost") {
                return Ok(vec![IpAddr::V4(Ipv4Addr::LOCALHOST)]);
            }
            let found = tokio::net::lookup_host((host, 0)).await?;
            Ok(found.map(|address| address.ip()).collect())
        })
    }
}
