//! TLS of the listeners: a certificate with its key, read again when their files change.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::{Mutex, RwLock};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::TlsAcceptor;

use crate::log;

pub const HTTP2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// Where the pair lies: PEM, the certificate followed by its chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// When each file of a pair was last written; None: it is not there.
type Written = [Option<SystemTime>; 2];

/// The pair in use. Connections keep the one they began with.
#[derive(Debug)]
pub struct Tls {
    pair: Pair,
    config: RwLock<Arc<ServerConfig>>,
    read: Mutex<Written>,
}

impl Tls {
    pub fn load(pair: Pair) -> io::Result<Self> {
        let written = pair.written(); // first: what is written while we read is read again
        Ok(Self {
            config: RwLock::new(pair.config()?),
            pair,
            read: Mutex::new(written),
        })
    }

    pub fn acceptor(&self) -> TlsAcceptor {
        Arc::clone(&self.config.read()).into()
    }

    /// Takes a pair that was replaced; one that cannot be used is told of once, the old one stays.
    pub fn renew(&self) {
        let written = self.pair.written();
        if std::mem::replace(&mut *self.read.lock(), written) == written {
            return;
        }
        match self.pair.config() {
            Ok(config) => {
                *self.config.write() = config;
                log::line("the TLS certificate was renewed");
            }
            Err(error) => log::line(format_args!("{error}; the old one stays in use")),
        }
    }
}

impl Pair {
    fn written(&self) -> Written {
        [&self.cert, &self.key].map(|path| fs::metadata(path).and_then(|m| m.modified()).ok())
    }

    fn config(&self) -> io::Result<Arc<ServerConfig>> {
        let chain = CertificateDer::pem_file_iter(&self.cert)
            .and_then(Iterator::collect)
            .map_err(|why| unusable(&self.cert, &why))?;
        let key =
            PrivateKeyDer::from_pem_file(&self.key).map_err(|why| unusable(&self.key, &why))?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(|why| unusable(&self.cert, &why))?;
        config.alpn_protocols = [HTTP2, HTTP1].map(<[u8]>::to_vec).into();
        Ok(Arc::new(config))
    }
}

fn unusable(path: &Path, why: &dyn std::fmt::Display) -> io::Error {
    let path = path.display();
    io::Error::other(format!("cannot use the TLS pair, file {path}: {why}"))
}
