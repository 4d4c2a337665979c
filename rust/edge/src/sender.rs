//! One upstream connection between requests, whichever HTTP it speaks.
//!
//! HTTP/2 is asked one request at a time too: a stream that nobody reads then stops no other.

use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::body::Upload;

const BUFFER: usize = 256 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    Http1,
    /// With prior knowledge, for gRPC.
    Http2,
}

#[derive(Debug)]
pub enum Sender {
    Http1(http1::SendRequest<Upload>),
    Http2(http2::SendRequest<Upload>),
}

/// Why there is no response, and the request if none of it was sent.
pub type Unanswered = (hyper::Error, Option<Request<Upload>>);

impl Sender {
    /// The errors of the connection reach the request that it carries.
    pub async fn begin<S>(stream: S, protocol: Protocol) -> hyper::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let stream = TokioIo::new(stream);
        match protocol {
            Protocol::Http1 => {
                let mut http = http1::Builder::new();
                let (sender, connection) = http.max_buf_size(BUFFER).handshake(stream).await?;
                tokio::spawn(connection.with_upgrades());
                Ok(Self::Http1(sender))
            }
            Protocol::Http2 => {
                let http = http2::Builder::new(TokioExecutor::new());
                let (sender, connection) = http.handshake(stream).await?;
                tokio::spawn(connection);
                Ok(Self::Http2(sender))
            }
        }
    }

    pub async fn send(
        &mut self,
        request: Request<Upload>,
    ) -> Result<Response<Incoming>, Unanswered> {
        let sent = match self {
            Self::Http1(sender) => sender.try_send_request(request).await,
            Self::Http2(sender) => sender.try_send_request(request).await,
        };
        sent.map_err(|mut error| {
            let unsent = error.take_message();
            (error.into_error(), unsent)
        })
    }

    pub async fn ready(&mut self) -> hyper::Result<()> {
        match self {
            Self::Http1(sender) => sender.ready().await,
            Self::Http2(sender) => sender.ready().await,
        }
    }

    pub fn is_ready(&self) -> bool {
        match self {
            Self::Http1(sender) => sender.is_ready(),
            Self::Http2(sender) => sender.is_ready(),
        }
    }

    pub fn is_closed(&self) -> bool {
        match self {
            Self::Http1(sender) => sender.is_closed(),
            Self::Http2(sender) => sender.is_closed(),
        }
    }
}
