//! Which pages a memory file (memfd) has: the rest are holes, and read as zeroes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::{extend, Memory, Run, PAGE};

/// The pages that the file mapped at `memory.at` holds, swapped ones among them.
///
/// The file is reached through /proc/PID/map_files: it has no name.
pub fn allocated(memory: Memory) -> io::Result<Vec<Run>> {
    let file = mapped_file(memory)?;
    let mut runs = Vec::new();
    let end = memory.pages as i64 * PAGE as i64;
    let mut at = 0;
    while at < end {
        let Some(data) = seek(&file, at, libc::SEEK_DATA)? else {
            break;
        };
        let hole = seek(&file, data, libc::SEEK_HOLE)?.unwrap_or(end).min(end);
        if data < hole {
            let (first, behind) = (data / PAGE as i64, (hole + PAGE as i64 - 1) / PAGE as i64);
            extend(&mut runs, first as u32, (behind - first) as u32);
        }
        at = hole.max(data + 1);
    }
    Ok(runs)
}

fn mapped_file(memory: Memory) -> io::Result<File> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", memory.pid))?;
    let begin = format!("{:x}-", memory.at);
    let range = maps
        .lines()
        .find(|line| line.starts_with(&begin))
        .and_then(|line| line.split(' ').next());
    let range =
        range.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no file is mapped there"))?;
    File::open(format!("/proc/{}/map_files/{range}", memory.pid))
}

/// None behind the last data.
fn seek(file: &File, at: i64, whence: libc::c_int) -> io::Result<Option<i64>> {
    // SAFETY: lseek has no pointers.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at, whence) };
    if found >= 0 {
        return Ok(Some(found));
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        error => Err(error),
    }
}
