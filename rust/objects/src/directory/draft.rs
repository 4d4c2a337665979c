//! Drafts: files that their writer holds a lock on, so that anybody can tell a draft in the making
//! from one whose writer died.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use rustix::fs::{flock, ioctl_ficlone, FlockOperation};

use crate::key::DRAFTS;
use crate::scratch::{random_name, Scratch};

pub(super) fn create(root: &Path) -> io::Result<Scratch> {
    let folder = root.join(DRAFTS);
    loop {
        let path = folder.join(random_name());
        let draft = match Scratch::create(path) {
            // Never the root: a store whose disk is not mounted is not begun anew.
            Err(error) if error.kind() == io::ErrorKind::NotFound && root.exists() => {
                make_folders(&folder)?;
                continue;
            }
            made => made?,
        };
        flock(&draft.file, FlockOperation::LockExclusive)?;
        // A sweep may have come between the two.
        if draft.file.metadata()?.nlink() > 0 {
            return Ok(draft);
        }
    }
}

/// Give the draft its name, durably, in the place of what had it.
pub(super) fn publish(draft: Scratch, target: &Path) -> io::Result<()> {
    let folder = prepare(&draft, target)?;
    draft.rename(target)?;
    sync(folder)
}

/// As `publish`, if nothing has the name; whether it got it.
pub(super) fn publish_new(draft: Scratch, target: &Path) -> io::Result<bool> {
    let folder = prepare(&draft, target)?;
    let published = draft.rename_new(target)?;
    // Also for the loser: what it is told is there must be there after a power cut.
    sync(folder)?;
    Ok(published)
}

fn prepare<'a>(draft: &Scratch, target: &'a Path) -> io::Result<&'a Path> {
    let folder = target.parent().unwrap_or(Path::new("/"));
    make_folders(folder)?;
    draft.file.sync_all()?;
    Ok(folder)
}

/// Make a folder and those above it, each durable in the one above.
pub(super) fn make_folders(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    let above = folder.parent().unwrap_or(Path::new("/"));
    make_folders(above)?;
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {}
        made => made?,
    }
    sync(above)
}

/// Copy all of a file into an empty one: shared extents where the filesystem can, else in the
/// kernel.
pub(super) fn copy(mut source: &File, mut target: &File) -> io::Result<u64> {
    if ioctl_ficlone(target, source).is_ok() {
        return Ok(target.metadata()?.len());
    }
    io::copy(&mut source, &mut target)
}

/// Remove the drafts of writers that are gone; how many.
pub(super) fn sweep(root: &Path) -> io::Result<u64> {
    let mut removed = 0;
    let entries = match std::fs::read_dir(root.join(DRAFTS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && root.exists() => return Ok(0),
        entries => entries?,
    };
    for entry in entries {
        removed += u64::from(sweep_one(&entry?.path())?);
    }
    Ok(removed)
}

fn sweep_one(path: &Path) -> io::Result<bool> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        file => file?,
    };
    // Its writer may have published it since the folder was read: the lock is on the file, the
    // name must still be its draft's.
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() || !path.exists() {
        return Ok(false);
    }
    std::fs::remove_file(path)?;
    Ok(true)
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
