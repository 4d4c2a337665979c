//! Queries in streams: each message behind its length in two bytes (RFC 1035 4.2.2).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::message::Query;
use super::upstreams::Upstreams;
use crate::netns::NetNs;

/// Connections of one slot; more wait in the backlog.
const AT_ONCE: usize = 32;
/// For a guest to send its next query, or to take its answer.
const IDLE: Duration = Duration::from_secs(10);

pub fn bind(netns: &NetNs, listen: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::from_std(netns.bind_tcp(listen)?.into())
}

pub async fn serve(listener: TcpListener, upstreams: Arc<Upstreams>) {
    let room = Arc::new(Semaphore::new(AT_ONCE));
    let mut running = JoinSet::new(); // ends with this loop
    while let Ok(permit) = Arc::clone(&room).acquire_owned().await {
        while running.try_join_next().is_some() {}
        let Ok((guest, _)) = listener.accept().await else {
            sleep(Duration::from_millis(100)).await; // out of descriptors: it passes
            continue;
        };
        let upstreams = Arc::clone(&upstreams);
        running.spawn(async move {
            let _ = converse(guest, &upstreams).await; // the guest leaves when it likes
            drop(permit);
        });
    }
}

async fn converse(mut guest: TcpStream, upstreams: &Upstreams) -> io::Result<()> {
    loop {
        let message = timeout(IDLE, read(&mut guest)).await??;
        let Some(query) = Query::parse(&message) else {
            return Ok(());
        };
        let reply = upstreams.resolve(&query, ask).await;
        timeout(IDLE, write(&mut guest, &reply)).await??;
    }
}

async fn ask(upstream: SocketAddr, query: Vec<u8>) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(upstream).await?;
    write(&mut stream, &query).await?;
    read(&mut stream).await
}

async fn read(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = vec![0; usize::from(length)];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

async fn write(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    let framed = [&length.to_be_bytes()[..], message].concat();
    stream.write_all(&framed).await
}
