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
/// What seeds the kernel's generator anew, whatever was in it.
const MIN_ENTROPY: usize = 32;

/// `struct rand_pool_info` of linux/random.h with room for our bytes.
#[repr(C)]
struct PoolInfo {
    entropy_bits: i32,
    size: i32,
    data: [u8; MAX_ENTROPY],
}

/// Credit the host's bytes to the kernel's generator and have it reseed at once: two guests from
/// one snapshot would draw the same numbers otherwise. Nothing can be told to generators of running
/// programs, except those that ask the kernel through the vDSO; fresh ones begin with ours.
pub fn reseed(entropy: &str) -> io::Result<()> {
    let bytes = BASE64_STANDARD.decode(entropy).map_err(io::Error::other)?;
    if bytes.len() < MIN_ENTROPY {
        return Err(io::Error::other(format!(
            "{} bytes are too few",
            bytes.len()
        )));
    }
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
///
/// `before` is who it was before a snapshot: what has not changed since is not written, for its
/// user may have edited the files, and a written block is one that the next snapshot has to keep.
pub fn assume(init: &Init, before: Option<&Init>) {
    let name = &init.hostname;
    let mut failures = Vec::new();
    let mut note = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            failures.push(format!("{what}: {error}"));
        }
    };
    if before.is_none_or(|before| before.hostname != *name) {
        note("hostname", sys::set_hostname(name));
        note(
            "/etc/hostname",
            replace("/etc/hostname", &format!("{name}\n")),
        );
        let hosts = hosts(name, before.map(|before| before.hostname.as_str()));
        note("/etc/hosts", replace("/etc/hosts", &hosts));
    }
    if before.is_none_or(|before| before.machine_id != init.machine_id) {
        note(
            "/etc/machine-id",
            replace("/etc/machine-id", &format!("{}\n", init.machine_id)),
        );
    }
    let former = before.and_then(|before| before.network.as_ref());
    if let Some(network) = &init.network {
        if former.is_none_or(|former| former.dns != network.dns) {
            note(
                "/etc/resolv.conf",
                replace("/etc/resolv.conf", &resolver(&network.dns)),
            );
        }
    }
    for failure in failures {
        println!("agentenv-agent: {failure}");
    }
}

fn resolver(servers: &[String]) -> String {
    let lines = servers
        .iter()
        .map(|server| format!("nameserver {server}\n"));
    lines.collect()
}

/// The content of /etc/hosts: that of the former name with the new one in its place.
fn hosts(name: &str, former: Option<&str>) -> String {
    let kept = former.and_then(|former| {
        let text = fs::read_to_string("/etc/hosts").ok()?;
        Some(renamed(&text, former, name))
    });
    kept.unwrap_or_else(|| {
        format!(
            "127.0.0.1\tlocalhost\n127.0.1.1\t{name}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
        )
    })
}

/// `text` with each whole word `former` replaced.
fn renamed(text: &str, former: &str, name: &str) -> String {
    text.split_inclusive(char::is_whitespace)
        .map(|piece| match piece.strip_prefix(former) {
            Some(rest) if rest.trim_end().is_empty() => format!("{name}{rest}"),
            _ => piece.to_owned(),
        })
        .collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_name_takes_the_place_of_the_former_and_nothing_else_changes() {
        let text = "127.0.0.1\tlocalhost\n127.0.1.1\told\n10.0.0.9  older old.lan old";
        let wanted = "127.0.0.1\tlocalhost\n127.0.1.1\tnew\n10.0.0.9  older old.lan new";
        assert_eq!(renamed(text, "old", "new"), wanted);
        assert_eq!(renamed("", "old", "new"), "");
    }

    #[test]
    fn resolvers_are_one_a_line() {
        let servers = ["10.0.0.1".to_owned(), "10.0.0.2".to_owned()];
        assert_eq!(
            resolver(&servers),
            "nameserver 10.0.0.1\nnameserver 10.0.0.2\n"
        );
    }
}
