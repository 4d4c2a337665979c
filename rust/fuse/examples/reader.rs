//! `reader PATH read|direct|mmap|mmap-random`: reads the first 4 KiB once and writes them to
//! standard output; SIGUSR1 is handled and does nothing. Tests stop and kill it while it waits.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use rustix::mm::{madvise, mmap, Advice, MapFlags, ProtFlags};

const SIZE: usize = 4096;

#[repr(align(4096))]
struct Page([u8; SIZE]);

extern "C" fn nothing(_: i32) {}

fn handle_usr1() {
    // SAFETY: the handler does nothing at all, so it is async-signal-safe; sigaction is zeroed,
    // which is valid for it, and lives across the call.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        assert_eq!(
            libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()),
            0
        );
    }
}

fn mapped(file: &File, advice: Option<Advice>) -> io::Result<[u8; SIZE]> {
    // SAFETY: a fresh mapping at an address of the kernel's choice, never unmapped, so it stays
    // valid; the file is at least SIZE long and immutable, so no page of it faults for good.
    let page = unsafe {
        let (read, private) = (ProtFlags::READ, MapFlags::PRIVATE);
        let page = mmap(std::ptr::null_mut(), SIZE, read, private, file.as_fd(), 0)?;
        if let Some(advice) = advice {
            madvise(page, SIZE, advice)?;
        }
        page.cast::<[u8; SIZE]>().read_volatile()
    };
    Ok(page)
}

fn main() -> io::Result<()> {
    handle_usr1();
    let words: Vec<String> = std::env::args().collect();
    let flags = if words[2] == "direct" {
        libc::O_DIRECT
    } else {
        0
    };
    let file = File::options()
        .read(true)
        .custom_flags(flags)
        .open(&words[1])?;
    let mut page = Page([0; SIZE]);
    match &words[2][..] {
        "mmap" => page.0 = mapped(&file, None)?,
        "mmap-random" => page.0 = mapped(&file, Some(Advice::Random))?,
        _ => file.read_exact_at(&mut page.0, 0)?,
    }
    io::stdout().write_all(&page.0)
}
