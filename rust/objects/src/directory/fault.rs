//! What the system's errors mean to the user of a store.

use std::io;
use std::path::Path;

use rustix::io::Errno;

use crate::error::{Error, Fault};

pub(super) fn explain(root: &Path, key: &str, error: &io::Error) -> Error {
    let fault = Fault::new(&root.to_string_lossy(), key, error);
    if error.kind() == io::ErrorKind::NotFound && !root.exists() {
        return Error::Unavailable(Fault {
            cause: "the store's folder is gone".into(),
            ..fault
        });
    }
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT) => Error::NotFound(Fault {
            cause: String::new(),
            ..fault
        }),
        Some(Errno::NOSPC | Errno::DQUOT) => Error::Full(fault),
        Some(Errno::ACCESS | Errno::PERM | Errno::ROFS) => Error::Denied(fault),
        Some(Errno::STALE | Errno::TIMEDOUT | Errno::HOSTDOWN | Errno::MFILE | Errno::NFILE) => {
            Error::Unavailable(fault)
        }
        // A key is where another has its folder, or the other way round.
        Some(Errno::NOTDIR | Errno::ISDIR | Errno::EXIST | Errno::NAMETOOLONG) => {
            Error::Invalid(fault)
        }
        _ => Error::Io(fault),
    }
}

/// The caller's own file, not the store's.
pub(super) fn of_source(root: &Path, key: &str, path: &Path, error: &io::Error) -> Error {
    let cause = format!("{}: {error}", path.display());
    Error::Io(Fault::new(&root.to_string_lossy(), key, cause))
}
