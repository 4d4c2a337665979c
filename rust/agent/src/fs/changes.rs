//! What the writable disk has over the image: each entry as it is now, and as the image has it.
//!
//! The disk is the upper layer of an overlay: a whiteout (character device 0:0) hides what the image
//! has of that name, an opaque folder all that the image has below it.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::sys;

const OPAQUE: &str = "trusted.overlay.opaque";

/// None: there is nothing of that name.
#[derive(Serialize)]
pub struct Change {
    path: PathBuf,
    now: Option<Entry>,
    image: Option<Entry>,
}

#[derive(Serialize)]
struct Entry {
    kind: &'static str,
    mode: u32,
    uid: u32,
    gid: u32,
    size: u64,
    mtime_ns: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
}

/// Where both layers can be walked, and what is told of files.
pub struct Walk<'a> {
    pub upper: &'a Path,
    pub image: &'a Path,
    pub digests: bool,
}

type Told<'a> = &'a mut dyn FnMut(&Change) -> io::Result<()>;

impl Walk<'_> {
    /// Tell each entry of the upper layer, folders before what is in them. What goes away
    /// meanwhile, or has a name that is no text, is left out.
    pub fn tell(&self, each: Told) -> io::Result<()> {
        self.folder(Path::new(""), false, each)
    }

    /// `hidden`: nothing of the image's folder is seen.
    fn folder(&self, path: &Path, hidden: bool, each: Told) -> io::Result<()> {
        let names = names(&self.upper.join(path))?;
        for name in &names {
            match self.entry(&path.join(name), hidden, each) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
        }
        if hidden || !is_opaque(&self.upper.join(path)) {
            return Ok(());
        }
        for name in self::names(&self.image.join(path))? {
            if names.binary_search(&name).is_err() {
                let path = path.join(name);
                let image = self.of_image(&path)?;
                each(&self.change(&path, None, image))?;
            }
        }
        Ok(())
    }

    fn entry(&self, path: &Path, hidden: bool, each: Told) -> io::Result<()> {
        let place = self.upper.join(path);
        let meta = fs::symlink_metadata(&place)?;
        let below = if hidden { None } else { self.of_image(path)? };
        let covers = below.as_ref().is_none_or(|image| image.kind != "directory");
        if meta.file_type().is_char_device() && meta.rdev() == 0 {
            return match below {
                Some(_) => each(&self.change(path, None, below)),
                None => Ok(()),
            };
        }
        let now = entry(&place, &meta, self.digests)?;
        each(&self.change(path, Some(now), below))?;
        if meta.is_dir() {
            let covers = covers || is_opaque(&place);
            self.folder(path, hidden || covers, each)?;
        }
        Ok(())
    }

    fn of_image(&self, path: &Path) -> io::Result<Option<Entry>> {
        let place = self.image.join(path);
        match fs::symlink_metadata(&place) {
            Ok(meta) => entry(&place, &meta, self.digests).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ENOTDIR) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn change(&self, path: &Path, now: Option<Entry>, image: Option<Entry>) -> Change {
        let path = Path::new("/").join(path);
        Change { path, now, image }
    }
}

fn entry(place: &Path, meta: &Metadata, digests: bool) -> io::Result<Entry> {
    let kind = meta.file_type();
    let is_text = |path: PathBuf| path.to_str().is_some().then_some(path);
    Ok(Entry {
        kind: match () {
            () if kind.is_dir() => "directory",
            () if kind.is_symlink() => "symlink",
            () if kind.is_fifo() => "fifo",
            () if kind.is_socket() => "socket",
            () if kind.is_file() => "file",
            () => "device",
        },
        mode: meta.mode() & 0o7777,
        uid: meta.uid(),
        gid: meta.gid(),
        size: if kind.is_file() { meta.size() } else { 0 },
        mtime_ns: meta.mtime() * 1_000_000_000 + meta.mtime_nsec(),
        target: match kind.is_symlink() {
            true => fs::read_link(place).map(is_text)?,
            false => None,
        },
        sha256: match digests && kind.is_file() {
            true => Some(digest(place)?),
            false => None,
        },
    })
}

fn digest(place: &Path) -> io::Result<String> {
    let (mut file, mut buffer) = (File::open(place)?, vec![0; 64 << 10]);
    let mut hash = Sha256::new();
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            length => hash.update(&buffer[..length]),
        }
    }
    Ok(hash
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

/// Those that are text, sorted.
fn names(folder: &Path) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        found.extend(entry?.file_name().into_string());
    }
    found.sort_unstable();
    Ok(found)
}

fn is_opaque(folder: &Path) -> bool {
    sys::attribute(folder, OPAQUE).is_ok_and(|value| value == b"y")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(upper: &Path, image: &Path) -> Vec<(String, char)> {
        let mut found = Vec::new();
        let walk = Walk {
            upper,
            image,
            digests: true,
        };
        walk.tell(&mut |change| {
            let letter = match (&change.now, &change.image) {
                (Some(_), None) => 'A',
                (None, Some(_)) => 'D',
                (Some(now), Some(image)) if now.sha256 == image.sha256 => '=',
                _ => 'M',
            };
            found.push((change.path.to_str().unwrap().to_owned(), letter));
            Ok(())
        })
        .unwrap();
        found
    }

    #[test]
    fn entries_are_told_with_what_the_image_has_in_their_place() {
        let root = std::env::temp_dir().join(format!("aenv-changes-{}", std::process::id()));
        let (upper, image) = (root.join("upper"), root.join("image"));
        for folder in ["upper/both", "upper/new", "image/both", "image/file"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        for (file, text) in [
            ("upper/both/changed", "now"),
            ("image/both/changed", "then"),
            ("image/both/kept", "then"),
            ("upper/both/same", "same"),
            ("image/both/same", "same"),
            ("upper/new/file", "now"),
            ("upper/file", "was a folder"),
            ("image/file/inside", "then"),
        ] {
            fs::write(root.join(file), text).unwrap();
        }
        let wanted = [
            ("/both", '='),
            ("/both/changed", 'M'),
            ("/both/same", '='),
            ("/file", 'M'),
            ("/new", 'A'),
            ("/new/file", 'A'),
        ];
        let found = told(&upper, &image);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(
            found,
            wanted.map(|(path, letter)| (path.to_owned(), letter))
        );
    }
}
