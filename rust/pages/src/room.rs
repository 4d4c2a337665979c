//! Memory for pages on their way: in huge pages, for a guest stands still while it is filled, and
//! each page of 4 KiB that the kernel has to find first would cost as much as its copy.

use std::io;
use std::ptr;

pub struct Room {
    at: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping is this value's alone; it is written through `&mut` only.
unsafe impl Send for Room {}
// SAFETY: as above.
unsafe impl Sync for Room {}

impl Room {
    /// So many bytes, all zeroes.
    pub fn new(bytes: usize) -> io::Result<Self> {
        if bytes == 0 {
            return Ok(Self {
                at: ptr::NonNull::dangling().as_ptr(),
                bytes,
            });
        }
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping just made; advice changes no content.
        unsafe { libc::madvise(at, bytes, libc::MADV_HUGEPAGE) };
        let at = at.cast();
        Ok(Self { at, bytes })
    }

    pub fn all(&mut self) -> &mut [u8] {
        // SAFETY: `bytes` bytes are mapped at `at` (or it dangles and there are none), borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) }
    }

    pub fn get(&self, from: usize, count: usize) -> &[u8] {
        // SAFETY: as in `all`, borrowed with others that read.
        let all = unsafe { std::slice::from_raw_parts(self.at, self.bytes) };
        &all[from..from + count]
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: the mapping made in `new`, of which nothing is borrowed any more.
            unsafe { libc::munmap(self.at.cast(), self.bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_in_is_there() {
        let mut room = Room::new(10_000).unwrap();
        room.all()[9_000..].fill(7);
        assert_eq!(room.get(8_999, 2), [0, 7]);
        assert!(Room::new(0).unwrap().all().is_empty());
    }
}
