//! The start as the first process of a sandbox whose kernel, network and mounts are there already.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::mounts;
use crate::{sudo, sys};

const KEY: &str = "AENV_CONTROL_KEY";
const MEMORY_NAME: &str = "agentenv-agent";
/// Where the host put us.
const PLACE: &str = "/.agentenv-agent";

/// What the host says first on the control port, until `init` gives another.
#[derive(Clone)]
pub struct Key(pub String);

impl Key {
    /// The one in our environment, which only such a sandbox has.
    pub fn given() -> Option<Self> {
        std::env::var(KEY).ok().map(Self)
    }
}

pub fn bring_up() -> Result<(), String> {
    run_from_memory().map_err(|error| format!("the agent cannot run from memory: {error}"))?;
    let _ = fs::remove_file(PLACE);
    sudo::take();
    // The sandbox's kernel puts a file system in memory there if the image's folder is empty.
    if own_mount("/tmp") {
        let _ = sys::unmount("/tmp");
        // It has made the folder, too, if the image had none.
        if fs::metadata("/tmp").is_ok_and(|found| found.permissions().mode() & 0o7777 == 0o777) {
            let _ = fs::set_permissions("/tmp", fs::Permissions::from_mode(0o1777));
        }
    }
    mounts::shared();
    Ok(())
}

/// Remove what lies in file systems that a boot would make anew; what cannot be is said and left.
pub fn empty_memory() {
    let folders = ["/dev/shm", "/run"].iter().flat_map(fs::read_dir);
    for entry in folders.flatten().flatten() {
        let path = entry.path();
        let removed = if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
        if let Err(error) = removed {
            println!("agentenv-agent: {} stays: {error}", path.display());
        }
    }
}

/// Run on as a copy that no file of the host's is needed for: a snapshot is to be whole by itself.
fn run_from_memory() -> std::io::Result<()> {
    let name = format!("/memfd:{MEMORY_NAME}");
    let running = fs::read_link("/proc/self/exe")?.into_os_string().into_vec();
    if running.starts_with(name.as_bytes()) {
        return Ok(());
    }
    let mut copy = fs::File::from(sys::memfd(MEMORY_NAME)?);
    copy.write_all(&fs::read("/proc/self/exe")?)?;
    let path = OsString::from(format!("/proc/self/fd/{}", copy.as_raw_fd()));
    Err(sys::run_as(Path::new(&path), &[MEMORY_NAME]))
}

fn own_mount(path: &str) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut targets = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    targets.any(|target| target == path)
}
