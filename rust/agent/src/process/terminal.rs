//! A pseudo terminal: our end of it, and the end a process gets as its controlling terminal.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use tokio::io::unix::AsyncFd;
use tokio::sync::Mutex;

use crate::sys;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub cols: u16,
    pub rows: u16,
}

/// Of a line that is not ended the kernel keeps less than 4096 bytes (N_TTY_BUF_SIZE) and drops the
/// rest.
const LINE: usize = 4000;

pub struct Terminal {
    ours: AsyncFd<std::fs::File>,
    /// Bytes typed since the last end of a line; held while typing, so that pieces keep their order.
    column: Mutex<usize>,
}

impl Terminal {
    /// A new terminal of that size; the second value is the process's end.
    pub fn open(size: Size) -> io::Result<(Arc<Self>, OwnedFd)> {
        let (ours, theirs) = sys::open_terminal()?;
        // SAFETY: the file owns its descriptor, and nothing swaps or closes it while it is registered.
        let ours = unsafe { AsyncFd::register(std::fs::File::from(ours)) }?;
        let column = Mutex::default();
        let terminal = Self { ours, column };
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
        sys::ioctl(self.ours.as_raw_fd(), libc::TIOCSWINSZ, &mut window)
    }

    /// Type into it, waiting while its buffer is full. A line longer than the kernel keeps reaches
    /// its reader in parts, by the end-of-file key between them, instead of being cut.
    pub async fn write(&self, data: &[u8]) -> io::Result<()> {
        let mut column = self.column.lock().await;
        for line in data.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            let mut rest = line;
            while *column + rest.len() > LINE {
                let (part, after) = rest.split_at(LINE.saturating_sub(*column));
                self.put(part).await?;
                if let Some(key) = sys::end_of_file_key(self.ours.as_raw_fd())? {
                    self.put(&[key]).await?;
                }
                (rest, *column) = (after, 0);
            }
            self.put(rest).await?;
            let is_ended = matches!(rest.last(), Some(b'\n' | b'\r'));
            *column = if is_ended { 0 } else { *column + rest.len() };
        }
        Ok(())
    }

    async fn put(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let mut ready = self.ours.writable().await?;
            let hung_up = ready.ready().is_write_closed() || ready.ready().is_read_closed();
            match ready.try_io(|file| file.get_ref().write(data)) {
                Ok(Ok(0)) => return Err(io::ErrorKind::BrokenPipe.into()),
                Ok(written) => data = &data[written?..],
                // Nobody has the other end: it stays "writable", and takes nothing any more.
                Err(_) if hung_up => return Err(io::ErrorKind::BrokenPipe.into()),
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// What was printed: None when nothing is there now, 0 when nobody has the other end any more.
    pub fn try_read(&self, buffer: &mut [u8]) -> Option<usize> {
        match self.ours.get_ref().read(buffer) {
            Ok(read) => Some(read),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(_) => Some(0), // EIO: the last descriptor of the other end was closed
        }
    }

    /// Wait until something was printed or the other end was closed.
    pub async fn readable(&self) -> io::Result<()> {
        self.ours
            .readable()
            .await
            .map(|mut ready| ready.clear_ready())
    }
}
