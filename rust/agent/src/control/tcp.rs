//! The control face as a TCP port, where there is no port of a machine's. Whoever reaches it has to
//! say the key of this generation first; the host may reach it, and so may its data plane for others.

use std::io::{self, BufRead, BufReader, Read};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

use super::converse;
use crate::init::Key;
use crate::state::Agent;

pub const PORT: u16 = 49982;
const KEY_DEADLINE: Duration = Duration::from_secs(5);
const KEY_MAX: u64 = 256;
/// The host needs one, and a second while it finds out that the first is cut.
const AT_ONCE: usize = 32;

pub fn serve(key: &Key, agent: &Arc<Agent>) -> io::Result<()> {
    let open = Arc::new(AtomicUsize::new(0));
    for connection in TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT))?.incoming() {
        // A connection that was cut before we took it.
        let Ok(connection) = connection else { continue };
        if open.fetch_add(1, Ordering::Relaxed) >= AT_ONCE {
            open.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (open, key, agent) = (Arc::clone(&open), key.clone(), Arc::clone(agent));
        // One that a snapshot carried over may hang for good: others must not wait for it.
        std::thread::spawn(move || {
            let _ = speak(&connection, &key, &agent);
            open.fetch_sub(1, Ordering::Relaxed);
        });
    }
    Ok(())
}

fn speak(connection: &TcpStream, key: &Key, agent: &Arc<Agent>) -> io::Result<()> {
    connection.set_nodelay(true)?;
    connection.set_read_timeout(Some(KEY_DEADLINE))?;
    let mut lines = BufReader::new(connection);
    let mut said = Vec::new();
    (&mut lines).take(KEY_MAX).read_until(b'\n', &mut said)?;
    let init = agent.init();
    let given = init.as_ref().and_then(|init| init.control_key.as_deref());
    let wanted = given.unwrap_or(&key.0);
    if !same(said.trim_ascii(), wanted.as_bytes()) {
        return Ok(());
    }
    connection.set_read_timeout(None)?;
    converse(lines, connection, agent)
}

/// Takes as long wherever they differ.
fn same(said: &[u8], wanted: &[u8]) -> bool {
    let differing = said.iter().zip(wanted).fold(0, |all, (a, b)| all | (a ^ b));
    !wanted.is_empty() && said.len() == wanted.len() && differing == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_key_is_the_key() {
        assert!(same(b"abc", b"abc"));
        for said in [&b""[..], b"ab", b"abcd", b"abd"] {
            assert!(!same(said, b"abc"));
        }
        assert!(!same(b"", b""));
    }
}
