//! Connections that leave HTTP (WebSocket): bytes both ways until one side or the route ends.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{ready, Context, Poll};

use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{copy_bidirectional_with_sizes, AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::body::Reply;
use crate::client::Client;
use crate::flight::Flight;
use crate::headers;
use crate::upstream::Upstream;

const BUFFER: usize = 32 * 1024;

/// The client's half of a protocol switch that was asked for.
pub struct Tunnel {
    client: Arc<Client>,
    downstream: OnUpgrade,
}

impl Tunnel {
    pub fn prepare(request: &mut Request<Incoming>, client: Arc<Client>) -> Self {
        let downstream = hyper::upgrade::on(request);
        Self { client, downstream }
    }

    /// The upstream agreed: answers its 101 and joins both sides once that is written.
    pub fn open(
        self,
        tasks: &TaskTracker,
        upstream: &Upstream,
        mut response: Response<Incoming>,
        flight: Flight,
    ) -> Response<Reply> {
        let far = hyper::upgrade::on(&mut response);
        let gone = match upstream {
            Upstream::Guest { link, .. } => link.gone.clone(),
            Upstream::Api(_) => CancellationToken::new(),
        };
        let client = self.client;
        let cut = async move {
            gone.cancelled().await;
            client.reset_on_close(); // before the streams are dropped
        };
        tasks.spawn(async move {
            tokio::select! {
                biased;
                () = cut => {}
                // Either side may end or fail at any time: that is how a tunnel ends.
                _ = join(self.downstream, far, &flight) => {}
            }
        });
        let (mut parts, _) = response.into_parts();
        headers::response(&mut parts.headers, true);
        parts.extensions.clear();
        Response::from_parts(parts, Reply::Whole(None))
    }
}

async fn join(near: OnUpgrade, far: OnUpgrade, flight: &Flight) -> io::Result<()> {
    let (near, far) = tokio::try_join!(near, far).map_err(io::Error::other)?;
    let mut near = TokioIo::new(near);
    let mut far = Counted {
        inner: TokioIo::new(far),
        flight,
    };
    copy_bidirectional_with_sizes(&mut near, &mut far, BUFFER, BUFFER).await?;
    Ok(())
}

/// The guest's side of a tunnel, counted.
struct Counted<'a, S> {
    inner: S,
    flight: &'a Flight,
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<'_, S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        self.flight.sent_out(buf.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<'_, S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.inner).poll_write(cx, buf))?;
        self.flight.sent_in(written);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
