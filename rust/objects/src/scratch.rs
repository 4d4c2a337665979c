//! Files that are not yet what they will be: gone again unless they are kept.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A new file of the writer's own, removed when dropped.
pub(crate) struct Scratch {
    pub file: File,
    pub path: PathBuf,
    kept: bool,
}

impl Scratch {
    pub fn create(path: PathBuf) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        Ok(Self {
            file,
            path,
            kept: false,
        })
    }

    /// One beside `target`, to be renamed to it.
    pub fn beside(target: &Path) -> io::Result<Self> {
        let mut name = std::ffi::OsString::from(".");
        name.push(target.file_name().unwrap_or_default());
        name.push(format!(".{}", random_name()));
        Self::create(target.with_file_name(name))
    }

    pub fn rename(mut self, target: &Path) -> io::Result<()> {
        std::fs::rename(&self.path, target)?;
        self.kept = true;
        Ok(())
    }

    /// As `rename`, but what is there stays; whether this file got the name.
    pub fn rename_new(mut self, target: &Path) -> io::Result<bool> {
        use rustix::fs::{renameat_with, RenameFlags, CWD};
        use rustix::io::Errno;
        match renameat_with(CWD, &self.path, CWD, target, RenameFlags::NOREPLACE) {
            Ok(()) => {
                self.kept = true;
                Ok(true)
            }
            Err(Errno::EXIST) => Ok(false),
            // Network filesystems know only links; the name of the draft goes when dropped.
            Err(Errno::INVAL | Errno::NOSYS) => match std::fs::hard_link(&self.path, target) {
                Ok(()) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
                Err(error) => Err(error),
            },
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.kept {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

pub(crate) fn random_name() -> String {
    format!("{:032x}", rand::random::<u128>())
}
