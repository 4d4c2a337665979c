//! From a process's pipe to its subscribers.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::unix::pipe;
use tokio::sync::watch;

use super::{Event, Process, Stream, Terminal};
use crate::sys;

/// E2B's pieces are at most this large.
const CHUNK: usize = 32 << 10;

/// Publish what comes until the pipe is closed or the process has ended and the pipe is empty.
///
/// A background child may hold the pipe for long after; it must not be killed by a closed pipe,
/// so what it still writes is read and dropped.
pub async fn pump(
    process: Arc<Process>,
    stream: Stream,
    receiver: pipe::Receiver,
    mut ended: watch::Receiver<bool>,
) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let has_ended = *ended.borrow();
        let found = if has_ended {
            // The runtime may have been told of the process's end before it is of its last output.
            sys::read(receiver.as_fd(), &mut buffer)
        } else {
            receiver.try_read(&mut buffer)
        };
        match found {
            Ok(0) => return,
            Ok(read) => {
                let data = Bytes::copy_from_slice(&buffer[..read]);
                process.publish(Event::Data(stream, data)).await;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if has_ended {
                    tokio::spawn(discard(receiver, buffer));
                    return;
                }
                tokio::select! {
                    ready = receiver.readable() => if ready.is_err() { return },
                    _ = ended.changed() => {}
                }
            }
            Err(_) => return,
        }
    }
}

/// As `pump`, for a terminal; it is hung up when the process has ended and all was read.
pub async fn pump_terminal(
    process: Arc<Process>,
    terminal: Arc<Terminal>,
    mut ended: watch::Receiver<bool>,
) {
    let mut buffer = vec![0; CHUNK];
    loop {
        match terminal.try_read(&mut buffer) {
            Some(0) => return,
            Some(read) => {
                let data = Bytes::copy_from_slice(&buffer[..read]);
                process.publish(Event::Data(Stream::Terminal, data)).await;
            }
            None if *ended.borrow() => return,
            None => tokio::select! {
                ready = terminal.readable() => if ready.is_err() { return },
                _ = ended.changed() => {}
            },
        }
    }
}

async fn discard(receiver: pipe::Receiver, mut buffer: Vec<u8>) {
    while receiver.readable().await.is_ok() {
        match receiver.try_read(&mut buffer) {
            Ok(0) => return,
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return,
            _ => {}
        }
    }
}
