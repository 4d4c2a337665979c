//! Queries in datagrams: each gets a socket, and with it a source port, of its own.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use tokio::net::UdpSocket;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::message::Query;
use super::upstreams::Upstreams;
use crate::netns::NetNs;

/// Queries under way for one slot; more are dropped, and the guest asks again.
const AT_ONCE: usize = 128;
/// A query with EDNS fits by far.
const MAX_QUERY: usize = 4096;
const MAX_REPLY: usize = 65_535;

pub fn bind(netns: &NetNs, listen: SocketAddr) -> io::Result<UdpSocket> {
    UdpSocket::from_std(netns.bind_udp(listen)?.into())
}

pub async fn serve(socket: UdpSocket, upstreams: Arc<Upstreams>) {
    let socket = Arc::new(socket);
    let room = Arc::new(Semaphore::new(AT_ONCE));
    let mut running = JoinSet::new(); // ends with this loop
    let mut buffer = vec![0; MAX_QUERY];
    loop {
        // An error here is the echo of an earlier reply that could not be delivered.
        let Ok((length, guest)) = socket.recv_from(&mut buffer).await else {
            continue;
        };
        while running.try_join_next().is_some() {}
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
            continue;
        };
        let message = buffer[..length].to_vec();
        let (socket, upstreams) = (Arc::clone(&socket), Arc::clone(&upstreams));
        running.spawn(async move {
            if let Some(query) = Query::parse(&message) {
                let reply = upstreams.resolve(&query, ask).await;
                let _ = socket.send_to(&reply, guest).await;
            }
            drop(permit);
        });
    }
}

/// One exchange from a fresh port. What does not answer this query is passed over: only the
/// upstream's address can send here, but a forger may have taken that.
async fn ask(upstream: SocketAddr, query: Vec<u8>) -> io::Result<Vec<u8>> {
    let any = match upstream {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(upstream).await?;
    socket.send(&query).await?;
    let id = [query[0], query[1]];
    let mut reply = vec![0; MAX_REPLY];
    loop {
        let length = socket.recv(&mut reply).await?;
        let sent = Query::parse(&query);
        if sent.is_some_and(|sent| sent.is_answered_by(id, &reply[..length])) {
            reply.truncate(length);
            return Ok(reply);
        }
    }
}
