//! Reading another process's memory.

use std::io;

use crate::{Memory, Run, PAGE};

/// Reads the pages of `run` into `out`, which is as long as they are.
pub fn read(memory: Memory, run: Run, out: &mut [u8]) -> io::Result<()> {
    debug_assert_eq!(out.len(), run.count as usize * PAGE);
    let mut done = 0;
    while done < out.len() {
        let rest = &mut out[done..];
        let local = libc::iovec {
            iov_base: rest.as_mut_ptr().cast(),
            iov_len: rest.len(),
        };
        let remote = libc::iovec {
            iov_base: (memory.address(run.first) + done as u64) as *mut libc::c_void,
            iov_len: rest.len(),
        };
        // SAFETY: `local` is a slice of ours; `remote` is only an address in the other process, where
        // the kernel checks it.
        let read = unsafe { libc::process_vm_readv(memory.pid, &local, 1, &remote, 1, 0) };
        match read {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n if n > 0 => done += n as usize,
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
    Ok(())
}
