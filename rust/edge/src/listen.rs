//! Public listeners: accepting, and one task for each client's connection.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::{pin, Pin};
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, TcpKeepalive, Type};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{interval, sleep, timeout, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::client::{Client, ClientStream, Patience, TICK};
use crate::forward::{self, Edge};
use crate::log;
use crate::tls::{self, Tls};

const BACKLOG: i32 = 4096;
const MAX_HEAD: usize = 64 * 1024;
const BUFFER: usize = 256 * 1024;
const HANDSHAKE: Duration = Duration::from_secs(15);
const MAX_STREAMS: u32 = 250;
/// What one upload may send ahead, and all on a connection: one that stops must not stop others.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;
/// What one download may have waiting for its client, besides the frame in hand.
const STREAM_BUFFER: usize = 128 * 1024;
const PING_EVERY: Duration = Duration::from_secs(60);
const PING_ANSWERED: Duration = Duration::from_secs(20);
/// After accept failed for want of descriptors or memory.
const BREATHER: Duration = Duration::from_millis(100);
/// A client that vanished without a word is noticed after 60 + 4 * 15 s.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(60);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(15);

/// What the accept loops share.
#[derive(Clone)]
pub struct Door {
    pub edge: Arc<Edge>,
    pub tls: Option<Arc<Tls>>,
    /// One permit for each connection that may be open.
    pub room: Arc<Semaphore>,
    pub draining: CancellationToken,
}

pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM.nonblocking(),
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    socket.bind(&SockAddr::from(address))?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// Accepts until the drain begins; the listener is closed then, so that a successor can bind.
pub async fn accept(listener: TcpListener, door: Door) {
    tokio::select! {
        () = door.draining.cancelled() => {}
        () = accept_all(&listener, &door) => {}
    }
}

async fn accept_all(listener: &TcpListener, door: &Door) {
    // The semaphore is never closed: without a permit the loop has nothing left to do.
    while let Ok(permit) = Arc::clone(&door.room).acquire_owned().await {
        match listener.accept().await {
            Ok((tcp, peer)) => {
                let inside = door.clone();
                door.edge.tasks.spawn(async move {
                    serve(tcp, peer, inside).await;
                    drop(permit);
                });
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                log::line(format_args!("cannot accept: {error}"));
                sleep(BREATHER).await;
            }
        }
    }
}

fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
    )
}

/// Serves one client; what ends it early is its own business.
async fn serve(tcp: TcpStream, peer: SocketAddr, door: Door) {
    prepare(&tcp);
    let client = Arc::new(Client::new(peer, door.tls.is_some()));
    let stream = ClientStream::new(tcp, Arc::clone(&client));
    let Some(tls) = &door.tls else {
        return serve_http1(stream, client, door).await;
    };
    let Ok(Ok(stream)) = timeout(HANDSHAKE, tls.acceptor().accept(stream)).await else {
        return;
    };
    if stream.get_ref().1.alpn_protocol() == Some(tls::HTTP2) {
        serve_http2(stream, client, door).await;
    } else {
        serve_http1(stream, client, door).await;
    }
}

async fn serve_http1<S>(stream: S, client: Arc<Client>, door: Door)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let Door { edge, draining, .. } = door;
    let service =
        service_fn(|request| forward::handle(Arc::clone(&edge), Arc::clone(&client), request));
    let mut http = http1::Builder::new();
    http.max_header_size(MAX_HEAD).max_buf_size(BUFFER);
    let connection = http
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    attend(
        connection,
        |connection| connection.graceful_shutdown(),
        &client,
        Patience::default(),
        draining,
    )
    .await;
}

async fn serve_http2<S>(stream: S, client: Arc<Client>, door: Door)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let Door { edge, draining, .. } = door;
    let service =
        service_fn(|request| forward::handle(Arc::clone(&edge), Arc::clone(&client), request));
    let mut http = http2::Builder::new(TokioExecutor::new());
    http.timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD as u32)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(STREAM_BUFFER)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_ANSWERED);
    let connection = http.serve_connection(TokioIo::new(stream), service);
    attend(
        connection,
        |connection| connection.graceful_shutdown(),
        &client,
        Patience::with_http2(),
        draining,
    )
    .await;
}

/// Stays until the client leaves, is cut, tries our patience, or the drain finds it idle.
async fn attend<C: Future>(
    connection: C,
    end_gently: fn(Pin<&mut C>),
    client: &Client,
    mut patience: Patience,
    draining: CancellationToken,
) {
    let (mut connection, mut drain) = (pin!(connection), pin!(draining.cancelled()));
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.reset(); // the first tick is not now
    let mut asked_to_end = false;
    loop {
        tokio::select! {
            biased;
            _ = connection.as_mut() => return, // its errors are the client's business
            () = client.was_cut() => return,
            () = drain.as_mut(), if !asked_to_end => {
                end_gently(connection.as_mut());
                asked_to_end = true;
            }
            _ = ticks.tick() => if patience.ended(client) { return },
        }
    }
}

fn prepare(tcp: &TcpStream) {
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_AFTER)
        .with_interval(KEEPALIVE_EVERY)
        .with_retries(4);
    // Neither can fail on a connected TCP socket in a way that would make it useless.
    let _ = tcp.set_nodelay(true);
    let _ = SockRef::from(tcp).set_tcp_keepalive(&keepalive);
}
