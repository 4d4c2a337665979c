//! Public listeners: accepting, and one task for each client's connection.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{interval, sleep, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::client::{Client, ClientStream, Patience, TICK};
use crate::forward::{self, Edge};
use crate::log;

const BACKLOG: i32 = 4096;
const MAX_HEAD: usize = 64 * 1024;
const BUFFER: usize = 256 * 1024;
/// After accept failed for want of descriptors or memory.
const BREATHER: Duration = Duration::from_millis(100);
/// A client that vanished without a word is noticed after 60 + 4 * 15 s.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(60);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(15);

/// What the accept loops share.
#[derive(Clone)]
pub struct Door {
    pub edge: Arc<Edge>,
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
                let draining = door.draining.clone();
                let edge = Arc::clone(&door.edge);
                door.edge.tasks.spawn(async move {
                    serve(tcp, peer, edge, draining).await;
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

/// Serves one client until it leaves, is cut, tries our patience, or the drain finds it idle.
async fn serve(tcp: TcpStream, peer: SocketAddr, edge: Arc<Edge>, draining: CancellationToken) {
    prepare(&tcp);
    let client = Arc::new(Client::new(peer));
    let stream = ClientStream::new(tcp, Arc::clone(&client));
    let service =
        service_fn(|request| forward::handle(Arc::clone(&edge), Arc::clone(&client), request));
    let mut http = http1::Builder::new();
    http.max_header_size(MAX_HEAD).max_buf_size(BUFFER);
    let connection = http
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let (mut connection, mut drain) = (pin!(connection), pin!(draining.cancelled()));
    let mut patience = Patience::default();
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
                connection.as_mut().graceful_shutdown();
                asked_to_end = true;
            }
            _ = ticks.tick() => if patience.ended(&client) { return },
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
