//! Extended attributes of files.

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use super::{c_string, checked};

/// Names from a NUL-separated list that `call` writes into a buffer; those that are no text are
/// left out.
fn attribute_names(call: impl Fn(*mut libc::c_char, usize) -> isize) -> io::Result<Vec<String>> {
    if call(std::ptr::null_mut(), 0) == 0 {
        return Ok(Vec::new()); // most files: a list of a large folder asks for each
    }
    let mut buffer = vec![0u8; 64 << 10]; // the kernel's own bound of such a list
    let length = call(buffer.as_mut_ptr().cast(), buffer.len());
    let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
    let names = buffer[..length].split(|byte| *byte == 0);
    let text = names.filter_map(|name| std::str::from_utf8(name).ok());
    Ok(text
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect())
}

/// Names of the extended attributes of the file at `path`, a link itself.
pub fn attributes(path: &Path) -> io::Result<Vec<String>> {
    let path = c_string(path.as_os_str())?;
    // SAFETY: `path` is NUL-terminated; the buffer is as long as it is said to be.
    attribute_names(|list, size| unsafe { libc::llistxattr(path.as_ptr(), list, size) })
}

pub fn attributes_of(file: &std::fs::File) -> io::Result<Vec<String>> {
    // SAFETY: the descriptor is open; the buffer is as long as it is said to be.
    attribute_names(|list, size| unsafe { libc::flistxattr(file.as_raw_fd(), list, size) })
}

/// The value of one extended attribute, a link's own.
pub fn attribute(path: &Path, name: &str) -> io::Result<Vec<u8>> {
    let (path, name) = (c_string(path.as_os_str())?, c_string(OsStr::new(name))?);
    let mut value = vec![0u8; 64 << 10];
    // SAFETY: both names are NUL-terminated; the buffer is as long as it is said to be.
    let length = unsafe {
        libc::lgetxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    value.truncate(usize::try_from(length).map_err(|_| io::Error::last_os_error())?);
    Ok(value)
}

pub fn set_attribute(file: &std::fs::File, name: &str, value: &[u8]) -> io::Result<()> {
    let name = c_string(OsStr::new(name))?;
    // SAFETY: `name` is NUL-terminated; pointer and length describe `value`.
    checked(unsafe {
        libc::fsetxattr(
            file.as_raw_fd(),
            name.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        )
    })
    .map(drop)
}

pub fn remove_attribute(file: &std::fs::File, name: &str) -> io::Result<()> {
    let name = c_string(OsStr::new(name))?;
    // SAFETY: `name` is NUL-terminated.
    checked(unsafe { libc::fremovexattr(file.as_raw_fd(), name.as_ptr()) }).map(drop)
}
