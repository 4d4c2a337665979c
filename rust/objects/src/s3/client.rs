//! The client: addresses, limits in time, identity.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::{BackoffConfig, ClientOptions, RetryConfig};

use crate::credentials::{chain, from_environment};
use crate::error::Error;
use crate::location::Place;

use super::resolve::Resolver;

const CONNECT: Duration = Duration::from_secs(5);
const RETRIES: usize = 2;
const RETRY_FOR: Duration = Duration::from_secs(10);

/// `bulk`: whether the server can delete many at once.
pub(super) fn build(place: &Place, bulk: bool) -> Result<AmazonS3, Error> {
    use_ring();
    let plain = place
        .endpoint
        .as_ref()
        .is_some_and(|url| url.scheme() == "http");
    let options = ClientOptions::new()
        .with_allow_http(plain)
        .with_connect_timeout(CONNECT.min(place.silence))
        .with_read_timeout(place.silence)
        // One for the whole of a transfer would forbid large objects.
        .with_timeout_disabled()
        .with_dns_resolver(Arc::new(Resolver));
    let region = place
        .region
        .clone()
        .or_else(|| from_environment("AWS_REGION"));
    let region = region.or_else(|| from_environment("AWS_DEFAULT_REGION"));
    let mut builder = AmazonS3Builder::new()
        .with_bucket_name(&place.bucket)
        .with_region(region.unwrap_or_else(|| "us-east-1".into()))
        .with_virtual_hosted_style_request(place.virtual_style)
        .with_credentials(chain(place.profile.clone(), &from_environment))
        .with_client_options(options)
        .with_disable_bulk_delete(!bulk)
        .with_retry(retries());
    if let Some(endpoint) = endpoint(place)? {
        builder = builder.with_endpoint(endpoint);
    }
    builder
        .build()
        .map_err(|error| Error::invalid(&place.name(), error))
}

/// Few: who calls knows how long it may wait.
fn retries() -> RetryConfig {
    RetryConfig {
        max_retries: RETRIES,
        retry_timeout: RETRY_FOR,
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(2),
            base: 2.,
        },
    }
}

/// In virtual style the library wants the bucket in the endpoint's host.
fn endpoint(place: &Place) -> Result<Option<String>, Error> {
    let Some(mut url) = place.endpoint.clone() else {
        return Ok(None);
    };
    if place.virtual_style {
        let host = format!("{}.{}", place.bucket, url.host_str().unwrap_or_default());
        let named = url.domain().is_some() && url.set_host(Some(&host)).is_ok();
        if !named {
            return Err(Error::invalid(
                &place.name(),
                "style=virtual needs an endpoint with a name, not a number",
            ));
        }
    }
    Ok(Some(url.as_str().trim_end_matches('/').to_owned()))
}

/// The TLS of the process, unless it has chosen one.
pub(crate) fn use_ring() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}
