//! The guest's one network device: address, default route, links up. By ioctl(2), as netdevice(7)
//! describes it: no tool of the image is needed.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};

use agentenv_wire::Network;

use crate::sys;

const DEVICE: &str = "eth0";

const SIOCDARP: libc::c_ulong = 0x8953;

/// Also right for a device that is configured already: nothing that is as wanted is touched, so
/// listeners and connections stay. `before` is what an earlier generation was given.
pub fn configure(wanted: &Network, before: Option<&Network>) -> io::Result<()> {
    let (address, prefix) = parse_cidr(&wanted.address)?;
    // Any IPv4 socket is a handle on the stack; it needs no bound address to take ioctls.
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let fd = socket.as_raw_fd();
    set_up(fd, "lo")?;
    set_address(fd, libc::SIOCSIFADDR, address)?;
    set_address(fd, libc::SIOCSIFNETMASK, netmask(prefix))?;
    if wanted.mtu > 0 {
        let mut request = request(DEVICE);
        request.ifr_ifru.ifru_mtu = wanted.mtu as i32;
        sys::ioctl(fd, libc::SIOCSIFMTU, &mut request)?;
    }
    set_up(fd, DEVICE)?;
    let gateway = parse_address(&wanted.gateway)?;
    if let Some(before) = before {
        let former = parse_address(&before.gateway)?;
        if former != gateway {
            // Gone already if the address took it along.
            let _ = sys::ioctl(fd, libc::SIOCDELRT, &mut default_route(former));
        }
        forget_neighbour(fd, gateway)?;
    }
    match sys::ioctl(fd, libc::SIOCADDRT, &mut default_route(gateway)) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        result => result,
    }
}

fn parse_address(text: &str) -> io::Result<Ipv4Addr> {
    text.parse().map_err(io::Error::other)
}

/// Another machine's gateway may have another hardware address: ask again instead of sending to the
/// old one until the kernel doubts it.
fn forget_neighbour(fd: RawFd, address: Ipv4Addr) -> io::Result<()> {
    // SAFETY: arpreq is plain data, for which all zeroes are valid.
    let mut request: libc::arpreq = unsafe { std::mem::zeroed() };
    request.arp_pa = socket_address(address);
    for (slot, byte) in request.arp_dev.iter_mut().zip(DEVICE.bytes()) {
        *slot = byte as libc::c_char;
    }
    match sys::ioctl(fd, SIOCDARP, &mut request) {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(()), // it is not known
        result => result,
    }
}

fn parse_cidr(text: &str) -> io::Result<(Ipv4Addr, u32)> {
    let (address, prefix) = text.split_once('/').unwrap_or((text, "32"));
    let prefix: u32 = prefix.parse().map_err(io::Error::other)?;
    if prefix > 32 {
        return Err(io::Error::other(format!("{text}: the prefix is above 32")));
    }
    Ok((parse_address(address)?, prefix))
}

fn netmask(prefix: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::MAX.checked_shl(32 - prefix).unwrap_or(0))
}

fn request(device: &str) -> libc::ifreq {
    // SAFETY: ifreq is plain data, for which all zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (slot, byte) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *slot = byte as libc::c_char;
    }
    request
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    for (slot, byte) in data[2..6].iter_mut().zip(address.octets()) {
        *slot = byte as libc::c_char;
    }
    libc::sockaddr {
        sa_family: libc::AF_INET as u16,
        sa_data: data,
    }
}

fn set_address(fd: RawFd, what: libc::c_ulong, address: Ipv4Addr) -> io::Result<()> {
    let mut request = request(DEVICE);
    request.ifr_ifru.ifru_addr = socket_address(address);
    sys::ioctl(fd, what, &mut request)
}

fn set_up(fd: RawFd, device: &str) -> io::Result<()> {
    let mut request = request(device);
    sys::ioctl(fd, libc::SIOCGIFFLAGS, &mut request)?;
    // SAFETY: SIOCGIFFLAGS filled this member of the union.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | libc::IFF_UP as i16;
    sys::ioctl(fd, libc::SIOCSIFFLAGS, &mut request)
}

fn default_route(gateway: Ipv4Addr) -> libc::rtentry {
    // SAFETY: rtentry is plain data and pointers, for which all zeroes are valid.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = socket_address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    route
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_masks() {
        assert_eq!(
            parse_cidr("10.233.0.2/30").unwrap(),
            (Ipv4Addr::new(10, 233, 0, 2), 30)
        );
        assert!(parse_cidr("10.0.0.1/33").is_err() && parse_cidr("x/8").is_err());
        let masks = [(0, 0), (8, 0xff00_0000), (30, 0xffff_fffc), (32, u32::MAX)];
        for (prefix, mask) in masks {
            assert_eq!(u32::from(netmask(prefix)), mask);
        }
    }
}
