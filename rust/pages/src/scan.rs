//! Which pages of a private mapping are its own: anonymous ones, where the rest is its file's.
//!
//! `PAGEMAP_SCAN` (Linux 6.7, Documentation/admin-guide/mm/pagemap.rst) walks page tables in the
//! kernel; before that /proc/PID/pagemap tells 8 bytes a page. A discarded page is neither present
//! nor swapped and shows the file again, so it counts as unchanged.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::{extend, Memory, Run, PAGE};

const FILE: u64 = 1 << 2;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const PFN_ZERO: u64 = 1 << 5;

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct ScanArgs {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = (3 << 30)
    | ((size_of::<ScanArgs>() as libc::c_ulong) << 16)
    | ((b'f' as libc::c_ulong) << 8)
    | 16;
const REGIONS: usize = 4096;

/// The pages of `memory` that the process changed since it was mapped, or since they were discarded.
pub fn changed(memory: Memory) -> io::Result<Vec<Run>> {
    let pagemap = File::open(format!("/proc/{}/pagemap", memory.pid))?;
    match by_scan(&pagemap, memory) {
        // A kernel before 6.7.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
            by_entries(&pagemap, memory)
        }
        other => other,
    }
}

fn by_scan(pagemap: &File, memory: Memory) -> io::Result<Vec<Run>> {
    let mut runs = Vec::new();
    let mut regions = vec![Region::default(); REGIONS];
    let (mut start, end) = (memory.at, memory.address(memory.pages));
    while start < end {
        let mut args = ScanArgs {
            size: size_of::<ScanArgs>() as u64,
            start,
            end,
            vec: regions.as_mut_ptr() as u64,
            vec_len: REGIONS as u64,
            category_inverted: FILE | PFN_ZERO,
            category_mask: FILE | PFN_ZERO,
            category_anyof_mask: PRESENT | SWAPPED,
            return_mask: PRESENT,
            ..ScanArgs::default()
        };
        // SAFETY: the arguments are of the layout and size that the kernel expects, `vec` points to
        // `vec_len` regions that live until the call returns.
        let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &mut args) };
        if found < 0 {
            return Err(io::Error::last_os_error());
        }
        for region in &regions[..found as usize] {
            let count = (region.end - region.start) / PAGE as u64;
            extend(&mut runs, memory.page(region.start), count as u32);
        }
        if args.walk_end <= start {
            break;
        }
        start = args.walk_end;
    }
    Ok(runs)
}

fn by_entries(pagemap: &File, memory: Memory) -> io::Result<Vec<Run>> {
    const SHARED_OR_FILE: u64 = 1 << 61;
    const SWAP: u64 = 1 << 62;
    const IN_MEMORY: u64 = 1 << 63;
    const AT_ONCE: u32 = 1 << 16;
    let mut runs = Vec::new();
    let mut bytes = vec![0; AT_ONCE as usize * 8];
    let mut page = 0;
    while page < memory.pages {
        let count = (memory.pages - page).min(AT_ONCE);
        let part = &mut bytes[..count as usize * 8];
        pagemap.read_exact_at(part, memory.address(page) / PAGE as u64 * 8)?;
        for (number, entry) in part.chunks_exact(8).enumerate() {
            let entry = u64::from_ne_bytes(entry.try_into().expect("8 bytes"));
            if entry & (IN_MEMORY | SWAP) != 0 && entry & SHARED_OR_FILE == 0 {
                extend(&mut runs, page + number as u32, 1);
            }
        }
        page += count;
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A private mapping of a file of `pages` pages in this process, unmapped at the end.
    struct Mapped(*mut u8, usize);

    impl Mapped {
        fn new(pages: usize) -> Self {
            let path =
                std::env::temp_dir().join(format!("agentenv-pages-{}-{pages}", std::process::id()));
            let mut file = File::options()
                .create(true)
                .truncate(true)
                .read(true)
                .write(true)
                .open(&path)
                .unwrap();
            file.write_all(&vec![7; pages * PAGE]).unwrap();
            std::fs::remove_file(path).unwrap();
            // SAFETY: a new mapping at an address of the kernel's choice.
            let at = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    pages * PAGE,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE,
                    file.as_raw_fd(),
                    0,
                )
            };
            assert_ne!(at, libc::MAP_FAILED);
            Self(at.cast(), pages)
        }

        fn put(&self, page: usize) {
            // SAFETY: inside the mapping.
            unsafe { self.0.add(page * PAGE).write_volatile(9) }
        }

        fn get(&self, page: usize) -> u8 {
            // SAFETY: inside the mapping.
            unsafe { self.0.add(page * PAGE).read_volatile() }
        }

        fn discard(&self, page: usize) {
            // SAFETY: inside the mapping.
            let done =
                unsafe { libc::madvise(self.0.add(page * PAGE).cast(), PAGE, libc::MADV_DONTNEED) };
            assert_eq!(done, 0);
        }

        fn memory(&self) -> Memory {
            let pid = std::process::id() as libc::pid_t;
            Memory {
                pid,
                at: self.0 as u64,
                pages: self.1 as u32,
            }
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: the mapping made above.
            unsafe { libc::munmap(self.0.cast(), self.1 * PAGE) };
        }
    }

    fn run(first: u32, count: u32) -> Run {
        Run { first, count }
    }

    #[test]
    fn what_was_written_is_changed_and_what_was_read_or_discarded_is_not() {
        let mapped = Mapped::new(64);
        for page in [3, 4, 5, 20, 63] {
            mapped.put(page);
        }
        assert_eq!(mapped.get(10), 7);
        mapped.discard(20);
        assert_eq!(mapped.get(20), 7);
        let wanted = vec![run(3, 3), run(63, 1)];
        assert_eq!(changed(mapped.memory()).unwrap(), wanted);
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        assert_eq!(by_entries(&pagemap, mapped.memory()).unwrap(), wanted);
    }

    #[test]
    fn more_regions_than_one_answer_holds() {
        let pages = 4 * REGIONS;
        let mapped = Mapped::new(pages);
        for page in (0..pages).step_by(2) {
            mapped.put(page);
        }
        let found = changed(mapped.memory()).unwrap();
        assert_eq!(found.len(), pages / 2);
        assert!(found
            .iter()
            .enumerate()
            .all(|(n, r)| *r == run(n as u32 * 2, 1)));
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        let memory = Memory {
            pid: i32::MAX - 1,
            at: 0,
            pages: 1,
        };
        assert!(changed(memory).is_err());
    }
}
