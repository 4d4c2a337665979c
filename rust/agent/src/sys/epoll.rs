//! What the kernel still has to tell of files that are no longer watched.

use std::fs;
use std::io;

const AT_ONCE: usize = 64;
/// Looks at one instance.
const ROUNDS: usize = 64;

/// Reads away what all epoll instances of this process would tell now; how many events. Those that
/// are level-triggered come again, so each is looked at for a bounded number of times.
pub fn discard() -> io::Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let number = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        let is_epoll =
            fs::read_link(entry.path()).is_ok_and(|to| to.ends_with("anon_inode:[eventpoll]"));
        if let (Some(fd), true) = (number, is_epoll) {
            count += discard_of(fd)?;
        }
    }
    Ok(count)
}

fn discard_of(fd: i32) -> io::Result<usize> {
    let mut count = 0;
    for _ in 0..ROUNDS {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; AT_ONCE];
        // SAFETY: the array holds as many events as the kernel is told of.
        let got = unsafe { libc::epoll_wait(fd, events.as_mut_ptr(), AT_ONCE as i32, 0) };
        match usize::try_from(got) {
            Err(_) => return Err(io::Error::last_os_error()),
            Ok(0) => break,
            Ok(got) => count += got,
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_is_read_away_is_not_told_again() {
        let (mut near, far) = UnixStream::pair().unwrap();
        // SAFETY: a plain call; the descriptor is closed below.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        let mut event = libc::epoll_event {
            events: (libc::EPOLLIN | libc::EPOLLET) as u32,
            u64: 7,
        };
        let (one, file) = (libc::EPOLL_CTL_ADD, far.as_raw_fd());
        // SAFETY: `event` outlives the call.
        let added = unsafe { libc::epoll_ctl(epoll, one, file, &mut event) };
        assert_eq!(added, 0);
        near.write_all(b"x").unwrap();
        assert_eq!(discard_of(epoll).unwrap(), 1);
        assert_eq!(discard_of(epoll).unwrap(), 0);
        near.write_all(b"y").unwrap();
        assert!(discard().unwrap() >= 1);
        assert_eq!(discard_of(epoll).unwrap(), 0);
        // SAFETY: it is ours.
        unsafe { libc::close(epoll) };
        assert!(discard_of(epoll).is_err());
    }
}
