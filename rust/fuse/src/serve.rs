//! Threads that read the same descriptor.
//!
//! They share it, without FUSE_DEV_IOC_CLONE: closing a clone, as a crash does, fails the requests
//! that were read through it, and nothing would be left to deliver again.

use std::io;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crate::answer::{self, Answer};
use crate::protocol::{opcode, Body, Header};
use crate::{Connection, Errno, Files, Negotiated, ReadReply};

/// More than the kernel asks for with our MAX_WRITE; BATCH_FORGET fills what there is.
const BUFFER: usize = 64 << 10;

/// Whose connection it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Just mounted: INIT will come.
    Fresh,
    /// An earlier server, now dead, answered INIT with this (None: it did not get to store it, or
    /// to answer; INIT then comes again). What it left unanswered is delivered again.
    Adopted(Option<Negotiated>),
}

impl Connection {
    /// Serve with `threads` threads until the mount is gone. Blocks.
    ///
    /// Fails at once if an adopted kernel cannot deliver again (before Linux 6.9): requests in
    /// flight would hang for ever, so the mount must be given up.
    pub fn serve(
        self: Arc<Self>,
        files: Arc<dyn Files>,
        threads: usize,
        start: Start,
    ) -> io::Result<()> {
        if let Start::Adopted(with) = start {
            self.set_negotiated(with);
            self.resend()?;
        }
        let watched = self.clone();
        let watcher = spawn("fuse-interrupt", move || {
            watched.waitings().watch();
            Ok(())
        })?;
        let workers: io::Result<Vec<Worker>> = (0..threads.max(1))
            .map(|number| {
                let (connection, files) = (self.clone(), files.clone());
                spawn(&format!("fuse-{number}"), move || {
                    work(&connection, &*files)
                })
            })
            .collect();
        let ended = workers?.into_iter().try_for_each(join);
        self.waitings().close();
        join(watcher)?;
        ended
    }
}

type Worker = JoinHandle<io::Result<()>>;

fn spawn(name: &str, body: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<Worker> {
    thread::Builder::new().name(name.to_owned()).spawn(body)
}

fn join(worker: Worker) -> io::Result<()> {
    worker
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("a thread of the FUSE server panicked")))
}

fn work(connection: &Arc<Connection>, files: &dyn Files) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    while let Some(length) = connection.receive(&mut buffer)? {
        if let Some((header, body)) = Header::parse(&buffer[..length]) {
            handle(connection, files, &header, body);
        }
    }
    Ok(())
}

fn handle(connection: &Arc<Connection>, files: &dyn Files, header: &Header, body: Body<'_>) {
    match header.opcode {
        opcode::READ => read(connection, files, header, body),
        opcode::INTERRUPT => interrupt(connection, header, body),
        opcode::INIT => reply(
            connection,
            header,
            guarded(|| init(connection, files, body)),
        ),
        _ => reply(
            connection,
            header,
            guarded(|| answer::answer(files, header, body)),
        ),
    }
}

fn reply(connection: &Connection, header: &Header, answer: Answer) {
    match answer {
        Ok(Some(packed)) => connection.send(header.unique, &[&packed.0]),
        Ok(None) => {}
        Err(error) => connection.send_error(header.unique, error),
    }
}

/// The server's code may panic; the thread goes on.
fn guarded<T>(call: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(Err(Errno::IO))
}

fn init(connection: &Connection, files: &dyn Files, body: Body<'_>) -> Answer {
    let (with, out) = answer::init(body)?;
    files.negotiated(&with);
    connection.set_negotiated(Some(with));
    Ok(Some(out))
}

fn read(connection: &Arc<Connection>, files: &dyn Files, header: &Header, body: Body<'_>) {
    let (offset, size) = match guarded(|| answer::read_range(files, header.node, body)) {
        Ok(range) => range,
        Err(error) => return connection.send_error(header.unique, error),
    };
    if size == 0 {
        return connection.send(header.unique, &[]);
    }
    let reply = ReadReply::new(connection.clone(), header.unique, header.pid, size);
    // In a panic the reply is dropped, which answers.
    let _ = guarded(|| {
        files.read(header.node, offset, size, reply);
        Ok(())
    });
}

/// `struct fuse_interrupt_in`: the unique of the request that is interrupted. It has no answer
/// (EAGAIN would have it sent again).
fn interrupt(connection: &Connection, header: &Header, body: Body<'_>) {
    match body.u64(0) {
        Ok(unique) => connection.waitings().interrupt(unique),
        Err(error) => connection.send_error(header.unique, error),
    }
}
