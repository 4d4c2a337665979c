//! TCP connections that a snapshot carried over: their other ends belong to another life, or, when
//! the guest was copied, to a sibling. The kernel ends them (sock_diag(7), SOCK_DESTROY) as if the
//! peer had; listeners, and connections whose both ends are in the guest, stay.
//!
//! Only those of the guest's own network namespace: what runs in namespaces of a container engine
//! in the guest finds out by itself.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::sys::Netlink;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const ERROR: u16 = libc::NLMSG_ERROR as u16;
const DONE: u16 = libc::NLMSG_DONE as u16;
const HEAD: usize = 16;
/// `struct inet_diag_sockid`: ports, addresses, interface, cookie.
const ID: usize = 48;
const LISTEN: u8 = 10;
/// ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK, CLOSING. One that is only being opened
/// will be answered in the new life, or not at all.
const CONNECTED: [u8; 6] = [1, 4, 5, 8, 9, 11];
const ANY_ID: [u8; ID] = [0; ID];

type End = (IpAddr, u16);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Connection {
    family: u8,
    state: u8,
    id: [u8; ID],
}

impl Connection {
    fn near(&self) -> End {
        (self.address(4), self.port(0))
    }

    fn far(&self) -> End {
        (self.address(20), self.port(2))
    }

    fn port(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.id[at], self.id[at + 1]])
    }

    /// An IPv6 socket may speak IPv4.
    fn address(&self, at: usize) -> IpAddr {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&self.id[at..at + 16]);
        if libc::c_int::from(self.family) == libc::AF_INET {
            Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]).into()
        } else {
            IpAddr::from(Ipv6Addr::from(bytes)).to_canonical()
        }
    }
}

/// End those to elsewhere; how many of them did not belong to our own port. Fails where the kernel
/// lacks `tcp_diag`.
pub fn end_inherited(own_port: u16) -> io::Result<usize> {
    let mut socket = Netlink::open(libc::NETLINK_SOCK_DIAG)?;
    let mut found = list(&mut socket, libc::AF_INET as u8)?;
    found.extend(list(&mut socket, libc::AF_INET6 as u8).unwrap_or_default());
    let mut ended = 0;
    for connection in to_elsewhere(&found) {
        // One that ended by itself meanwhile is refused.
        if end(&mut socket, connection).is_ok() && connection.near().1 != own_port {
            ended += 1;
        }
    }
    Ok(ended)
}

/// Connected sockets whose other end is none of those found.
fn to_elsewhere(found: &[Connection]) -> Vec<&Connection> {
    let known: HashSet<(End, End)> = found.iter().map(|c| (c.near(), c.far())).collect();
    let connected = found.iter().filter(|c| CONNECTED.contains(&c.state));
    connected
        .filter(|c| !known.contains(&(c.far(), c.near())))
        .collect()
}

fn list(socket: &mut Netlink, family: u8) -> io::Result<Vec<Connection>> {
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_DUMP;
    let states = !(1_u32 << LISTEN);
    socket.send(&request(
        SOCK_DIAG_BY_FAMILY,
        flags,
        family,
        states,
        &ANY_ID,
    ))?;
    let mut found = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let length = socket.receive(&mut buffer)?;
        if take_answers(&buffer[..length], &mut found)? {
            return Ok(found);
        }
    }
}

fn end(socket: &mut Netlink, connection: &Connection) -> io::Result<()> {
    let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK;
    let id = &connection.id;
    socket.send(&request(
        SOCK_DESTROY,
        flags,
        connection.family,
        u32::MAX,
        id,
    ))?;
    let mut buffer = [0; 1024];
    let length = socket.receive(&mut buffer)?;
    take_answers(&buffer[..length], &mut Vec::new()).map(drop)
}

/// `struct nlmsghdr` and `struct inet_diag_req_v2`.
fn request(kind: u16, flags: libc::c_int, family: u8, states: u32, id: &[u8; ID]) -> Vec<u8> {
    let length = HEAD + 8 + ID;
    let mut message = Vec::with_capacity(length);
    message.extend((length as u32).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((flags as u16).to_ne_bytes());
    message.extend([0; 8]); // sequence and port: the kernel's to fill
    message.extend([family, libc::IPPROTO_TCP as u8, 0, 0]);
    message.extend(states.to_ne_bytes());
    message.extend(id);
    message
}

/// Add what a datagram lists; whether it was the last.
fn take_answers(mut data: &[u8], found: &mut Vec<Connection>) -> io::Result<bool> {
    while data.len() >= HEAD {
        let length = u32::from_ne_bytes([data[0], data[1], data[2], data[3]]) as usize;
        if length < HEAD || length > data.len() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let body = &data[HEAD..length];
        match u16::from_ne_bytes([data[4], data[5]]) {
            DONE | ERROR => return acknowledged(body).map(|()| true),
            SOCK_DIAG_BY_FAMILY => found.extend(connection(body)),
            _ => {}
        }
        data = &data[length.next_multiple_of(4).min(data.len())..];
    }
    Ok(false)
}

/// The code at the end of a list, or of an acknowledgement.
fn acknowledged(body: &[u8]) -> io::Result<()> {
    let code = body.first_chunk().copied().map_or(0, i32::from_ne_bytes);
    if code >= 0 {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(-code))
    }
}

/// `struct inet_diag_msg`: family, state, timer, retransmissions, id, figures.
fn connection(body: &[u8]) -> Option<Connection> {
    Some(Connection {
        family: *body.first()?,
        state: *body.get(1)?,
        id: *body.get(4..)?.first_chunk()?,
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn made(state: u8, near: (&str, u16), far: (&str, u16)) -> Connection {
        let mut id = [0; ID];
        id[..2].copy_from_slice(&near.1.to_be_bytes());
        id[2..4].copy_from_slice(&far.1.to_be_bytes());
        let mut family = libc::AF_INET6 as u8;
        for (at, text) in [(4, near.0), (20, far.0)] {
            match text.parse().unwrap() {
                IpAddr::V4(address) => {
                    family = libc::AF_INET as u8;
                    id[at..at + 4].copy_from_slice(&address.octets());
                }
                IpAddr::V6(address) => id[at..at + 16].copy_from_slice(&address.octets()),
            }
        }
        Connection { family, state, id }
    }

    #[test]
    fn only_connections_to_elsewhere_are_ended() {
        let found = [
            made(1, ("10.0.0.2", 40000), ("192.0.2.1", 443)),
            made(1, ("127.0.0.1", 40001), ("127.0.0.1", 80)),
            made(1, ("::ffff:127.0.0.1", 80), ("::ffff:127.0.0.1", 40001)),
            made(5, ("10.0.0.2", 40002), ("10.0.0.2", 80)),
            made(6, ("10.0.0.2", 80), ("10.0.0.2", 40002)),
            made(2, ("10.0.0.2", 40003), ("192.0.2.1", 443)),
            made(8, ("::ffff:10.0.0.2", 49983), ("::ffff:10.0.0.1", 50000)),
        ];
        assert_eq!(to_elsewhere(&found), [&found[0], &found[6]]);
        assert_eq!(found[2].near(), (Ipv4Addr::LOCALHOST.into(), 80));
    }

    #[test]
    fn answers_are_read_to_their_end() {
        let one = made(1, ("10.0.0.2", 1), ("10.0.0.3", 2));
        let mut body = vec![one.family, one.state, 0, 0];
        body.extend(one.id);
        body.extend([0; 20]);
        let message = |kind: u16, body: &[u8]| {
            let mut data = ((HEAD + body.len()) as u32).to_ne_bytes().to_vec();
            data.extend(kind.to_ne_bytes());
            data.extend([0; 10]);
            data.extend(body);
            data
        };
        let listed = message(SOCK_DIAG_BY_FAMILY, &body);
        let mut found = Vec::new();
        assert!(!take_answers(&[&listed[..], &listed].concat(), &mut found).unwrap());
        let last = message(DONE, &[0; 4]);
        assert!(take_answers(&[&listed[..], &last].concat(), &mut found).unwrap());
        assert_eq!(found, [one.clone(), one.clone(), one]);
        let refused = message(ERROR, &(-libc::ENOENT).to_ne_bytes());
        let error = take_answers(&refused, &mut found).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
        assert!(take_answers(&message(ERROR, &[0; 20]), &mut found).unwrap());
        assert!(take_answers(&listed[..40], &mut found).is_err());
    }

    #[test]
    fn the_kernels_list_has_both_ends_of_a_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ends = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
        let near = (ends.0.ip(), ends.0.port());
        let far = (ends.1.ip(), ends.1.port());
        let mut socket = Netlink::open(libc::NETLINK_SOCK_DIAG).unwrap();
        let Ok(found) = list(&mut socket, libc::AF_INET as u8) else {
            return; // a kernel without tcp_diag
        };
        let pairs: Vec<_> = found.iter().map(|c| (c.near(), c.far())).collect();
        assert!(pairs.contains(&(near, far)) && pairs.contains(&(far, near)));
        assert!(to_elsewhere(&found).iter().all(|c| c.near() != near));
    }
}
