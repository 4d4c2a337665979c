//! Network namespaces: a socket belongs for life to the namespace its maker was in.
//!
//! A thread steps into the namespace, makes the socket and steps back. Nothing awaits in
//! between, so no other task ever runs on the thread while it is elsewhere.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::OnceLock;

use rustix::thread::{move_into_link_name_space, LinkNameSpaceType};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

static HOME: OnceLock<File> = OnceLock::new();

/// Remembers the namespace of the process itself; called once before any other thread runs.
pub fn remember_home() -> io::Result<()> {
    let home = File::open("/proc/self/ns/net")?;
    HOME.set(home)
        .map_err(|_| io::Error::other("the home namespace is already known"))
}

/// A network namespace held open, which stays usable after its path is gone.
#[derive(Debug)]
pub struct NetNs(File);

impl NetNs {
    pub fn open(path: &Path) -> io::Result<Self> {
        let netns = Self(File::open(path)?);
        netns.within(|| Ok(()))?; // refuses a path that is no network namespace
        Ok(netns)
    }

    /// An unconnected, non-blocking TCP socket for reaching `address` from inside.
    pub fn tcp(&self, address: &SocketAddr) -> io::Result<Socket> {
        self.within(|| socket(Domain::for_address(*address), Type::STREAM, Protocol::TCP))
    }

    pub fn bind_tcp(&self, address: SocketAddr) -> io::Result<Socket> {
        let socket = self.tcp(&address)?;
        socket.set_reuse_address(true)?;
        socket.bind(&SockAddr::from(address))?;
        socket.listen(64)?;
        Ok(socket)
    }

    pub fn bind_udp(&self, address: SocketAddr) -> io::Result<Socket> {
        let socket =
            self.within(|| socket(Domain::for_address(address), Type::DGRAM, Protocol::UDP))?;
        socket.bind(&SockAddr::from(address))?;
        Ok(socket)
    }

    fn within<T>(&self, make: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))?;
        let _back = StepBack;
        make()
    }
}

fn socket(domain: Domain, kind: Type, protocol: Protocol) -> io::Result<Socket> {
    Socket::new(domain, kind.nonblocking(), Some(protocol)) // close-on-exec by default
}

struct StepBack;

impl Drop for StepBack {
    fn drop(&mut self) {
        let home = HOME.get().map(File::as_fd);
        let back = home.map(|fd| move_into_link_name_space(fd, Some(LinkNameSpaceType::Network)));
        if !matches!(back, Some(Ok(()))) {
            // A thread left in a guest's namespace would make later sockets of other
            // sandboxes there: an isolation failure that no error path can repair.
            std::process::abort();
        }
    }
}
