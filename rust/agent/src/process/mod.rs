//! Processes that users start: their table, their subscribers, their end.

mod freezer;
mod group;
mod halt;
mod output;
mod spawn;
mod terminal;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, watch, Mutex as AsyncMutex};

pub use freezer::Freezer;
pub use group::prepare;
pub use spawn::{start, StartError, Streams};
pub use terminal::{Size, Terminal};

use group::Group;

/// How long the end of a process is told to a late `Connect`.
const END_KEPT: Duration = Duration::from_secs(30);
/// Pieces of output on their way to one subscriber; with more the process waits.
const QUEUE: usize = 4;

#[derive(Debug, Clone)]
pub struct Config {
    pub cmd: String,
    pub args: Vec<String>,
    pub envs: HashMap<String, String>,
    pub cwd: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
    Terminal,
}

#[derive(Debug, Clone)]
pub struct End {
    /// -1 when a signal ended it.
    pub exit_code: i32,
    pub exited: bool,
    /// `exit status N` or `signal: NAME`, as Go words it.
    pub status: String,
    /// The guest's kernel killed it, or what it started, for want of memory.
    pub out_of_memory: bool,
}

#[derive(Debug, Clone)]
pub enum Event {
    Data(Stream, Bytes),
    End(End),
}

pub struct Process {
    pub pid: u32,
    pub tag: Option<String>,
    pub config: Config,
    /// None: no stdin was asked for, or it was closed.
    stdin: AsyncMutex<Option<pipe::Sender>>,
    /// Some: it was started in a terminal, which is its input and output.
    pub terminal: Option<Arc<Terminal>>,
    subscribers: Mutex<Vec<mpsc::Sender<Event>>>,
    ended: watch::Sender<Option<End>>,
    group: Group,
}

impl Process {
    /// Events from now on; of an ended process only its end.
    pub fn subscribe(&self) -> mpsc::Receiver<Event> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        match &*self.ended.borrow() {
            Some(end) => drop(sender.try_send(Event::End(end.clone()))),
            None => self
                .subscribers
                .lock()
                .expect("no holder panics")
                .push(sender),
        }
        receiver
    }

    pub fn is_running(&self) -> bool {
        self.ended.borrow().is_none()
    }

    /// Return when it has ended and all its output was handed out.
    pub async fn wait(&self) {
        let mut ended = self.ended.subscribe();
        let _ = ended.wait_for(Option::is_some).await; // fails only when we are gone
    }

    /// Hand an event to every subscriber, waiting for the slowest; those that left are forgotten.
    async fn publish(&self, event: Event) {
        let subscribers = self.subscribers.lock().expect("no holder panics").clone();
        let mut left = false;
        for subscriber in subscribers {
            left |= subscriber.send(event.clone()).await.is_err();
        }
        if left {
            self.subscribers
                .lock()
                .expect("no holder panics")
                .retain(|s| !s.is_closed());
        }
    }

    /// Write to its standard input, waiting while the pipe is full. BrokenPipe: it has none.
    pub async fn write_stdin(&self, mut data: &[u8]) -> io::Result<()> {
        let mut stdin = self.stdin.lock().await;
        let pipe = stdin.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        while !data.is_empty() {
            pipe.writable().await?;
            match pipe.try_write(data) {
                Ok(written) => data = &data[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub async fn close_stdin(&self) {
        self.stdin.lock().await.take();
    }

    /// Signal it and all that it started.
    pub fn signal(&self, signal: libc::c_int) -> io::Result<()> {
        if self.is_running() {
            self.group.signal(self.pid as libc::pid_t, signal)
        } else {
            Err(io::Error::from_raw_os_error(libc::ESRCH))
        }
    }
}

/// All processes by pid, ended ones for a while longer.
#[derive(Default)]
pub struct Table {
    known: Mutex<HashMap<u32, Arc<Process>>>,
}

impl Table {
    pub fn running(&self) -> Vec<Arc<Process>> {
        let known = self.known.lock().expect("no holder panics");
        let mut running: Vec<_> = known.values().filter(|p| p.is_running()).cloned().collect();
        running.sort_by_key(|process| process.pid);
        running
    }

    pub fn by_pid(&self, pid: u32) -> Option<Arc<Process>> {
        self.known
            .lock()
            .expect("no holder panics")
            .get(&pid)
            .cloned()
    }

    /// The running process of that tag.
    pub fn by_tag(&self, tag: &str) -> Option<Arc<Process>> {
        self.running()
            .into_iter()
            .find(|process| process.tag.as_deref() == Some(tag))
    }

    fn add(&self, process: &Arc<Process>) {
        self.known
            .lock()
            .expect("no holder panics")
            .insert(process.pid, Arc::clone(process));
    }

    /// Forget it, unless a later process got the same pid.
    fn remove(&self, process: &Arc<Process>) {
        let mut known = self.known.lock().expect("no holder panics");
        if known
            .get(&process.pid)
            .is_some_and(|found| Arc::ptr_eq(found, process))
        {
            known.remove(&process.pid);
        }
    }
}
