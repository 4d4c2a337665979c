//! The client's side of a connection: its stream, and the handle by which others end it.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::Arc;
use std::task::{ready, Context, Poll};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// Time for the head of the first request to arrive, and for the rest of any begun head.
const HEAD_TICKS: u32 = 3;
/// SDKs keep idle connections for 300 s; we must not be the first to close.
const IDLE_TICKS: u32 = 66;
pub const TICK: Duration = Duration::from_secs(5);

/// Shared by a connection's task, its stream and the requests on it.
#[derive(Debug)]
pub struct Client {
    pub peer: SocketAddr,
    /// It speaks TLS to us.
    pub secure: bool,
    received: AtomicU64,
    served: AtomicU64,
    /// Requests under way; HTTP/2 has many at once.
    active: AtomicU32,
    reset: AtomicBool,
    cut: Notify,
}

impl Client {
    pub fn new(peer: SocketAddr, secure: bool) -> Self {
        Self {
            peer,
            secure,
            received: AtomicU64::new(0),
            served: AtomicU64::new(0),
            active: AtomicU32::new(0),
            reset: AtomicBool::new(false),
            cut: Notify::new(),
        }
    }

    /// Ends the connection with a reset, so that no reader takes what it got for the whole.
    pub fn cut(&self) {
        self.reset_on_close();
        self.cut.notify_one();
    }

    pub fn reset_on_close(&self) {
        self.reset.store(true, Relaxed);
    }

    pub async fn was_cut(&self) {
        self.cut.notified().await;
    }

    pub fn begin(&self) {
        self.active.fetch_add(1, Relaxed);
    }

    pub fn end(&self) {
        self.served.fetch_add(1, Relaxed);
        self.active.fetch_sub(1, Relaxed);
    }

    fn moment(&self) -> Moment {
        Moment {
            received: self.received.load(Relaxed),
            served: self.served.load(Relaxed),
            busy: self.active.load(Relaxed) > 0,
        }
    }
}

/// What is known of a connection at one tick.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Moment {
    received: u64,
    served: u64,
    busy: bool,
}

/// Judges, tick by tick, whether a client only holds its connection (pure).
#[derive(Debug, Default)]
pub struct Patience {
    last: Moment,
    ticks: u32,
    head_begun: bool,
    multiplexed: bool,
}

impl Patience {
    /// For HTTP/2, where bytes may be pings and windows, and no sign of a head.
    pub fn with_http2() -> Self {
        Self {
            multiplexed: true,
            ..Self::default()
        }
    }

    pub fn ended(&mut self, client: &Client) -> bool {
        self.judge(client.moment())
    }

    fn judge(&mut self, now: Moment) -> bool {
        let moved_on = now.busy || now.served != self.last.served;
        let more = now.received != self.last.received;
        self.last = now;
        if moved_on {
            *self = Self {
                last: now,
                multiplexed: self.multiplexed,
                ..Self::default()
            };
            return false;
        }
        if more && !self.head_begun && !self.multiplexed {
            self.head_begun = true;
            self.ticks = 0;
        }
        self.ticks += 1;
        let first = now.served == 0;
        self.ticks
            >= if first || self.head_begun {
                HEAD_TICKS
            } else {
                IDLE_TICKS
            }
    }
}

/// A client's TCP stream; where there is TLS, it lies upon this.
#[derive(Debug)]
pub struct ClientStream {
    tcp: TcpStream,
    client: Arc<Client>,
}

impl ClientStream {
    pub fn new(tcp: TcpStream, client: Arc<Client>) -> Self {
        Self { tcp, client }
    }
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        if self.client.reset.load(Relaxed) {
            let _ = SockRef::from(&self.tcp).set_linger(Some(Duration::ZERO));
        }
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.tcp).poll_read(cx, buf))?;
        let read = (buf.filled().len() - before) as u64;
        self.client.received.fetch_add(read, Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(received: u64, served: u64, busy: bool) -> Moment {
        Moment {
            received,
            served,
            busy,
        }
    }

    fn ticks_until_ended(patience: &mut Patience, mut next: impl FnMut(u32) -> Moment) -> u32 {
        (1..1000)
            .find(|tick| patience.judge(next(*tick)))
            .unwrap_or(1000)
    }

    #[test]
    fn a_head_that_trickles_in_ends_the_connection() {
        let mut patience = Patience::default();
        let ended = ticks_until_ended(&mut patience, |tick| at(u64::from(tick), 0, false));
        assert_eq!(ended, HEAD_TICKS);
    }

    #[test]
    fn a_connection_that_never_asked_is_ended_early() {
        let mut patience = Patience::default();
        assert_eq!(
            ticks_until_ended(&mut patience, |_| at(0, 0, false)),
            HEAD_TICKS
        );
    }

    #[test]
    fn a_kept_alive_connection_may_idle_for_long() {
        let mut patience = Patience::default();
        assert!(!patience.judge(at(100, 1, false)));
        let ended = ticks_until_ended(&mut patience, |_| at(100, 1, false));
        assert_eq!(ended, IDLE_TICKS);
    }

    #[test]
    fn a_second_head_may_not_trickle_either() {
        let mut patience = Patience::default();
        assert!(!patience.judge(at(100, 1, false)));
        let ended = ticks_until_ended(&mut patience, |tick| at(100 + u64::from(tick), 1, false));
        assert_eq!(ended, HEAD_TICKS);
    }

    #[test]
    fn pings_are_no_head() {
        let mut patience = Patience::with_http2();
        assert!(!patience.judge(at(100, 1, false)));
        let ended = ticks_until_ended(&mut patience, |tick| at(100 + u64::from(tick), 1, false));
        assert_eq!(ended, IDLE_TICKS);
    }

    #[test]
    fn a_connection_is_busy_until_its_last_request_has_ended() {
        let client = Client::new(([127, 0, 0, 1], 1).into(), true);
        client.begin();
        client.begin();
        client.end();
        assert!(client.moment().busy);
        client.end();
        assert!(!client.moment().busy);
    }

    #[test]
    fn a_request_under_way_takes_as_long_as_it_takes() {
        let mut patience = Patience::default();
        assert_eq!(ticks_until_ended(&mut patience, |_| at(100, 0, true)), 1000);
    }
}
