//! Who this sandbox is: names, files that say so, and fresh randomness.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

use agentenv_wire::Init;
use base64::prelude::{Engine as _, BASE64_STANDARD};

use crate::sys;

const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
/// The most that one call takes; the host sends 64 bytes.
const MAX_ENTROPY: usize = 512;

/// `struct rand_pool_info` of linux/random.h with room for our bytes.
#[repr(C)]
struct PoolInfo {
    entropy_bits: i32,
    size: i32,
    data: [u8; MAX_ENTROPY],
}

/// Credit the host's bytes to the kernel's generator and have it reseed at once: two guests from
/// one snapshot would draw the same numbers otherwise.
pub fn reseed(entropy: &str) -> io::Result<()> {
    let bytes = BASE64_STANDARD.decode(entropy).map_err(io::Error::other)?;
    let bytes = &bytes[..bytes.len().min(MAX_ENTROPY)];
    let mut pool = PoolInfo {
        entropy_bits: bytes.len() as i32 * 8,
        size: bytes.len() as i32,
        data: [0; MAX_ENTROPY],
    };
    pool.data[..bytes.len()].copy_from_slice(bytes);
    let device = OpenOptions::new().write(true).open("/dev/urandom")?;
    sys::ioctl(device.as_raw_fd(), RNDADDENTROPY, &mut pool)?;
    sys::ioctl(device.as_raw_fd(), RNDRESEEDCRNG, &mut 0_i32)
}

/// Write hostname, hosts, resolver and machine id. An image that makes one impossible is let be.
pub fn assume(init: &Init) {
    let name = &init.hostname;
    let mut failures = Vec::new();
    let mut note = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            failures.push(format!("{what}: {error}"));
        }
    };
    note("hostname", sys::set_hostname(name));
    note(
        "/etc/hostname",
        replace("/etc/hostname", &format!("{name}\n")),
    );
    let hosts = format!(
        "127.0.0.1\tlocalhost\n127.0.1.1\t{name}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    );
    note("/etc/hosts", replace("/etc/hosts", &hosts));
    note(
        "/etc/machine-id",
        replace("/etc/machine-id", &format!("{}\n", init.machine_id)),
    );
    if let Some(network) = &init.network {
        let lines: String = network
            .dns
            .iter()
            .map(|server| format!("nameserver {server}\n"))
            .collect();
        note("/etc/resolv.conf", replace("/etc/resolv.conf", &lines));
    }
    for failure in failures {
        println!("agentenv-agent: {failure}");
    }
}

/// A plain file with this content, in place of whatever was there (often a link to nowhere).
fn replace(path: &str, content: &str) -> io::Result<()> {
    let path = Path::new(path);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
        fs::remove_file(path)?;
    }
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?
        .write_all(content.as_bytes())
}
