//! filesystem.Filesystem: stat, list, make, move, remove. Blocking; the caller gives it a thread.

use std::fs;
use std::io;
use std::os::unix::fs::{chown, symlink};
use std::path::Path;

use serde_json::{json, Value};

use super::entry::describe;
use crate::http::connect::{Code, Fault};
use crate::users::{Database, User};

/// Entries that one list answers; a larger folder is refused, not cut.
const MAX_ENTRIES: usize = 1_000_000;

type Answer = Result<Value, Fault>;

fn fault(path: &str) -> impl Fn(io::Error) -> Fault + '_ {
    move |error| {
        let code = match error.kind() {
            io::ErrorKind::NotFound => Code::NotFound,
            io::ErrorKind::PermissionDenied => Code::PermissionDenied,
            io::ErrorKind::NotADirectory
            | io::ErrorKind::IsADirectory
            | io::ErrorKind::InvalidFilename
            | io::ErrorKind::InvalidInput => Code::InvalidArgument,
            io::ErrorKind::AlreadyExists => Code::AlreadyExists,
            io::ErrorKind::DirectoryNotEmpty
            | io::ErrorKind::ResourceBusy
            | io::ErrorKind::ReadOnlyFilesystem => Code::FailedPrecondition,
            io::ErrorKind::StorageFull => Code::ResourceExhausted,
            _ => Code::Internal,
        };
        let message = match code {
            Code::NotFound => format!("path '{path}' does not exist"),
            _ => format!("'{path}': {error}"),
        };
        Fault::new(code, message)
    }
}

fn entry(path: &str) -> Answer {
    let found = describe(Path::new(path), &Database::load()).map_err(fault(path))?;
    Ok(json!({"entry": found}))
}

pub fn stat(path: &str) -> Answer {
    entry(path)
}

pub fn make_dir(path: &str, user: &User) -> Answer {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => {
            return Err(Fault::new(
                Code::AlreadyExists,
                format!("directory '{path}' exists"),
            ))
        }
        Ok(_) => {
            let message = format!("path '{path}' exists and is not a directory");
            return Err(Fault::new(Code::InvalidArgument, message));
        }
        Err(_) => make_parents(Path::new(path), user).map_err(fault(path))?,
    }
    entry(path)
}

/// `path` and what is missing above it, owned by `user`.
pub fn make_parents(path: &Path, user: &User) -> io::Result<()> {
    let missing: Vec<&Path> = path.ancestors().take_while(|path| !path.is_dir()).collect();
    for folder in missing.into_iter().rev() {
        match fs::create_dir(folder) {
            Ok(()) => chown(folder, Some(user.uid), Some(user.gid))?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {}
            // Something else has the name of a folder on the way.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(io::ErrorKind::NotADirectory.into())
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

pub fn rename(source: &str, destination: &str, user: &User) -> Answer {
    if Path::new(destination).starts_with(source) && source != destination {
        let message = format!("'{source}' cannot be moved into itself");
        return Err(Fault::new(Code::InvalidArgument, message));
    }
    fs::symlink_metadata(source).map_err(fault(source))?;
    if let Some(parent) = Path::new(destination).parent() {
        make_parents(parent, user).map_err(fault(destination))?;
    }
    match fs::rename(source, destination) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
            copy_tree(Path::new(source), Path::new(destination)).map_err(fault(destination))?;
            remove_tree(source).map_err(fault(source))?;
        }
        result => result.map_err(fault(source))?,
    }
    entry(destination)
}

/// For a move between file systems (/tmp to /run, say): modes and owners are kept.
fn copy_tree(source: &Path, destination: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let meta = fs::symlink_metadata(source)?;
    if meta.is_symlink() {
        symlink(fs::read_link(source)?, destination)?;
    } else if meta.is_dir() {
        fs::create_dir(destination)?;
        for item in fs::read_dir(source)? {
            let item = item?;
            copy_tree(&item.path(), &destination.join(item.file_name()))?;
        }
        fs::set_permissions(destination, meta.permissions())?;
    } else {
        fs::copy(source, destination)?;
    }
    std::os::unix::fs::lchown(destination, Some(meta.uid()), Some(meta.gid()))
}

/// Gone afterwards, whatever it was; a missing path is success.
pub fn remove(path: &str) -> Answer {
    if path == "/" {
        return Err(Fault::new(Code::InvalidArgument, "'/' cannot be removed"));
    }
    match remove_tree(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(fault(path)(error)),
        _ => Ok(json!({})),
    }
}

fn remove_tree(path: &str) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
}

/// Depth-first in lexical order, without the folder itself.
pub fn list(path: &str, depth: u32) -> Answer {
    let meta = fs::metadata(path).map_err(fault(path))?;
    if !meta.is_dir() {
        let message = format!("path '{path}' is not a directory");
        return Err(Fault::new(Code::InvalidArgument, message));
    }
    let (users, mut found) = (Database::load(), Vec::new());
    walk(Path::new(path), depth.max(1), &users, &mut found).map_err(fault(path))?;
    Ok(json!({"entries": found}))
}

fn walk(folder: &Path, depth: u32, users: &Database, found: &mut Vec<Value>) -> io::Result<()> {
    let mut names: Vec<_> = fs::read_dir(folder)?
        .map(|item| item.map(|item| item.file_name()))
        .collect::<io::Result<_>>()?;
    names.sort();
    for name in names {
        if found.len() >= MAX_ENTRIES {
            return Err(io::Error::other(
                "the folder holds too many entries; list a smaller one",
            ));
        }
        let path = folder.join(name);
        match describe(&path, users) {
            Ok(entry) => found.push(entry),
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue, // gone meanwhile
            Err(error) => return Err(error),
        }
        if depth > 1 && fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_dir()) {
            walk(&path, depth - 1, users, found)?;
        }
    }
    Ok(())
}
