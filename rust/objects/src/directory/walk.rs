//! Between keys and paths: where a key lies, and which key lies at a path.

use std::fs::DirEntry;
use std::io;
use std::path::{Path, PathBuf};

use crate::key::{check_key, DRAFTS};
use crate::Entry;

pub(super) fn place(root: &Path, key: &str) -> PathBuf {
    match key.rsplit_once('/') {
        Some((folder, name)) => root.join(folder).join(fan(name)).join(name),
        None => root.join(fan(key)).join(key),
    }
}

/// Keys are ASCII, so any two bytes are a name.
fn fan(name: &str) -> &str {
    name.get(..2).unwrap_or(name)
}

/// The key whose object lies at `path` (relative to the root); None for what is not ours.
fn key_at(path: &Path) -> Option<String> {
    let mut parts: Vec<&str> = path
        .iter()
        .map(|part| part.to_str())
        .collect::<Option<_>>()?;
    let name = parts.pop()?;
    if parts.pop()? != fan(name) {
        return None;
    }
    parts.push(name);
    let key = parts.join("/");
    check_key(&key).is_ok().then_some(key)
}

pub(super) fn entry(path: &Path, key: String) -> io::Result<Entry> {
    let facts = std::fs::metadata(path)?;
    if !facts.is_file() {
        return Err(rustix::io::Errno::NOENT.into());
    }
    Ok(Entry {
        key,
        size: facts.len(),
        modified: facts.modified()?,
    })
}

pub(super) fn list(root: &Path, prefix: &str) -> io::Result<Vec<Entry>> {
    let (mut found, mut folders) = (Vec::new(), vec![root.join(prefix)]);
    while let Some(folder) = folders.pop() {
        let entries = match std::fs::read_dir(&folder) {
            Err(error) if gone(&error) && folder != root => continue,
            entries => entries?,
        };
        for item in entries {
            look(root, prefix, &item?, &mut found, &mut folders)?;
        }
    }
    if found.is_empty() && !root.exists() {
        return Err(rustix::io::Errno::NOENT.into());
    }
    found.sort_unstable_by(|a, b| a.key.cmp(&b.key));
    Ok(found)
}

fn look(
    root: &Path,
    prefix: &str,
    item: &DirEntry,
    found: &mut Vec<Entry>,
    folders: &mut Vec<PathBuf>,
) -> io::Result<()> {
    let path = item.path();
    let inside = path.strip_prefix(root).unwrap_or(&path);
    match item.file_type() {
        Ok(kind) if kind.is_dir() && inside != Path::new(DRAFTS) => folders.push(path),
        Ok(kind) if kind.is_file() => {
            let Some(key) = key_at(inside).filter(|key| key.starts_with(prefix)) else {
                return Ok(());
            };
            match entry(&path, key) {
                Err(error) if gone(&error) => {}
                known => found.push(known?),
            }
        }
        Err(error) if !gone(&error) => return Err(error),
        _ => {}
    }
    Ok(())
}

fn gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_and_its_path_lead_to_each_other() {
        for (key, path) in [
            ("pack/abcd", "pack/ab/abcd"),
            ("abcd", "ab/abcd"),
            ("a", "a/a"),
            ("a/b/c-1", "a/b/c-/c-1"),
        ] {
            assert_eq!(place(Path::new(""), key), Path::new(path));
            assert_eq!(key_at(Path::new(path)).as_deref(), Some(key));
        }
    }

    #[test]
    fn what_is_not_ours_has_no_key() {
        for path in [
            "abcd",
            "pack/xy/abcd",
            "pack/AB/ABcd",
            "lost+found/x",
            "drafts/ab/abcd",
        ] {
            assert_eq!(key_at(Path::new(path)), None, "{path}");
        }
    }
}
