//! What holds a process and all it starts: a cgroup of its own where the guest has cgroup2, else
//! what can be found of its descendants.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::state::Agent;
use crate::sys;

pub(super) const ROOT: &str = "/sys/fs/cgroup";
pub(super) const PARENT: &str = "/sys/fs/cgroup/agentenv";
/// A tree that forks while it is killed is walked again, but not for ever.
pub(super) const ROUNDS: usize = 16;

pub struct Group(Option<PathBuf>);

/// Have the guest's groups ready; a kernel without cgroup2 goes without.
pub fn prepare() {
    if !Path::new(ROOT).join("cgroup.controllers").exists() {
        return;
    }
    // `memory` counts the kernel's memory killings by group.
    for folder in [ROOT, PARENT] {
        let _ = fs::create_dir_all(folder);
        let _ = fs::write(Path::new(folder).join("cgroup.subtree_control"), "+memory");
    }
    sweep();
}

/// Remove groups that are empty: a background child may outlive its process, and its group with it.
pub fn sweep() {
    for entry in fs::read_dir(PARENT).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let _ = fs::remove_dir(entry.path()); // refused while somebody is in it
        }
    }
}

impl Group {
    /// A new group, to be entered by `entry`; none outside a guest or where it has no cgroup2.
    pub fn create(agent: &Agent) -> Self {
        if !agent.is_guest() {
            return Self(None);
        }
        let name = format!("{}-{}", std::process::id(), agent.next_number());
        let folder = Path::new(PARENT).join(name);
        Self(fs::create_dir(&folder).is_ok().then_some(folder))
    }

    /// Writing `0` to it moves the writer in.
    pub fn entry(&self) -> Option<OwnedFd> {
        let file = self.0.as_ref()?.join("cgroup.procs");
        let opened = OpenOptions::new().write(true).open(file).ok()?;
        Some(opened.into())
    }

    /// Signal every process in it, and those of the tree of `leader`, for which it was made: root in
    /// the guest may have moved some elsewhere, as service managers do.
    pub fn signal(&self, leader: libc::pid_t, signal: libc::c_int) -> io::Result<()> {
        let mut told = HashSet::new();
        if let Some(folder) = &self.0 {
            if signal == libc::SIGKILL {
                fs::write(folder.join("cgroup.kill"), "1")?;
            } else {
                tell(members_of(folder), signal, &mut told)?;
            }
        }
        for _ in 0..ROUNDS {
            let mut tree: Vec<_> = tree_of(leader).into_iter().collect();
            // It first: a shell that sees its child killed ends by itself, with a code of its own.
            tree.sort_by_key(|pid| *pid != leader);
            if !tell(tree, signal, &mut told)? {
                break;
            }
        }
        Ok(())
    }

    /// Whether the kernel killed a process of it for want of memory.
    pub fn ran_out_of_memory(&self) -> bool {
        let events = self.0.as_ref().map(|folder| folder.join("memory.events"));
        let text = events.and_then(|path| fs::read_to_string(path).ok());
        text.is_some_and(|text| {
            let mut counts = text
                .lines()
                .filter_map(|line| line.strip_prefix("oom_kill "));
            counts.any(|count| count != "0")
        })
    }
}

fn ignore_gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        other => other,
    }
}

/// Signal those that were not told yet; false if there was none.
fn tell(
    found: impl IntoIterator<Item = libc::pid_t>,
    signal: libc::c_int,
    told: &mut HashSet<libc::pid_t>,
) -> io::Result<bool> {
    let mut any = false;
    for pid in found {
        if told.insert(pid) {
            ignore_gone(sys::kill(pid, signal))?;
            any = true;
        }
    }
    Ok(any)
}

/// The processes of a cgroup and of those below it.
pub(super) fn members_of(folder: &Path) -> Vec<libc::pid_t> {
    let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    let mut found: Vec<_> = text.lines().filter_map(|line| line.parse().ok()).collect();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(members_of(&entry.path()));
        }
    }
    found
}

/// The leader, those of its session, and whoever descends from one of them.
fn tree_of(leader: libc::pid_t) -> HashSet<libc::pid_t> {
    let all: Vec<Kin> = Kin::all().collect();
    let mut found: HashSet<_> = all
        .iter()
        .filter(|kin| kin.pid == leader || kin.session == leader)
        .map(|kin| kin.pid)
        .collect();
    loop {
        let children = all
            .iter()
            .filter(|kin| found.contains(&kin.parent) && !found.contains(&kin.pid));
        let children: Vec<_> = children.map(|kin| kin.pid).collect();
        if children.is_empty() {
            return found;
        }
        found.extend(children);
    }
}

/// Whose a process is, from /proc/PID/stat.
pub(super) struct Kin {
    pub(super) pid: libc::pid_t,
    pub(super) parent: libc::pid_t,
    session: libc::pid_t,
    state: char,
}

impl Kin {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        // `thread-self` would give a thread of ours, of which nobody else knows.
        let processes = entries.filter(|entry| entry.file_name().as_bytes()[0].is_ascii_digit());
        processes.filter_map(|entry| Self::read(&entry.path()))
    }

    pub(super) fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    pub(super) fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    fn read(folder: &Path) -> Option<Self> {
        let mut text = String::new();
        io::Read::read_to_string(&mut File::open(folder.join("stat")).ok()?, &mut text).ok()?;
        Self::parse(&text)
    }

    /// `pid (name) state ppid pgrp session ...`; the name may hold spaces and parentheses.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (pid, rest) = text.split_once(" (")?;
        let mut fields = rest.rsplit_once(") ")?.1.split(' ');
        // To gVisor one that is just ending is number 0, which init and the agent would descend from.
        let pid = pid.parse().ok().filter(|pid| *pid > 0)?;
        Some(Self {
            pid,
            state: fields.next()?.chars().next()?,
            parent: fields.next()?.parse().ok()?,
            session: fields.nth(1)?.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kin_is_read_whatever_the_name() {
        let kin = Kin::parse("42 (a) b (c) S 7 40 41 0 -1").unwrap();
        assert_eq!((kin.pid, kin.parent, kin.session), (42, 7, 41));
        assert!(!kin.is_stopped() && !kin.is_dead());
        assert!(Kin::parse("7 (x) T 1 1 1").unwrap().is_stopped());
        assert!(Kin::parse("42 (a").is_none());
        assert!(Kin::parse("0 (sleep) Z 7 40 41 0 -1").is_none());
    }
}
