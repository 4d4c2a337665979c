//! A pseudo terminal: our end of it, and the end a process gets as its controlling terminal.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use tokio::io::unix::AsyncFd;

use crate::sys;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub cols: u16,
    pub rows: u16,
}

pub struct Terminal(AsyncFd<std::fs::File>);

impl Terminal {
    /// A new terminal of that size; the second value is the process's end.
    pub fn open(size: Size) -> io::Result<(Arc<Self>, OwnedFd)> {
        let (ours, theirs) = sys::open_terminal()?;
        // SAFETY: the file owns its descriptor, and nothing swaps or closes it while it is registered.
        let terminal = Self(unsafe { AsyncFd::register(std::fs::File::from(ours)) }?);
        terminal.resize(size)?;
        Ok((Arc::new(terminal), theirs))
    }

    /// Change its size; the kernel tells the foreground processes by SIGWINCH.
    pub fn resize(&self, size: Size) -> io::Result<()> {
        let mut window = libc::winsize {
            ws_row: size.rows,
            ws_col: size.cols,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        sys::ioctl(self.0.as_raw_fd(), libc::TIOCSWINSZ, &mut window)
    }

    /// Type into it, waiting while its buffer is full.
    pub async fn write(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let mut ready = self.0.writable().await?;
            if let Ok(written) = ready.try_io(|file| file.get_ref().write(data)) {
                data = &data[written?..];
            }
        }
        Ok(())
    }

    /// What was printed: None when nothing is there now, 0 when nobody has the other end any more.
    pub fn try_read(&self, buffer: &mut [u8]) -> Option<usize> {
        match self.0.get_ref().read(buffer) {
            Ok(read) => Some(read),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(_) => Some(0), // EIO: the last descriptor of the other end was closed
        }
    }

    /// Wait until something was printed or the other end was closed.
    pub async fn readable(&self) -> io::Result<()> {
        self.0.readable().await.map(|mut ready| ready.clear_ready())
    }
}
