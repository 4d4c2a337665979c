//! Preloaded into an engine: lays the files of memory layers into its guest's memory.
//!
//! The engine maps one plain file as the guest's memory, privately. Here that mapping becomes one of
//! pieces: each stretch of the memory maps the file of the layer it comes from, so that all machines
//! whose histories share a layer share its pages; what no layer holds is anonymous. So nothing that
//! the engine does to its file (it punches holes where the guest gave memory back) meets a layer.
//!
//! `AGENTENV_MEMORY` names a folder with `ram`, the file that the engine maps, and `map`:
//!
//! ```text
//! agentenv-map 1
//! f PATH                       a file; the first is number 0
//! p AT BYTES FILE OFFSET       bytes of the memory that come from a file
//! ```
//!
//! Where the memory lies is left in the folder as `at`: its address and bytes, in decimal.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libc::{c_int, c_void, off_t, size_t};

const FOLDER: &str = "AGENTENV_MEMORY";
const HEAD: &str = "agentenv-map 1";

/// The folder, and which file the engine maps there.
struct Watched {
    folder: PathBuf,
    device: u64,
    inode: u64,
}

fn watched() -> Option<&'static Watched> {
    static WATCHED: OnceLock<Option<Watched>> = OnceLock::new();
    let find = || {
        let folder = PathBuf::from(std::env::var_os(FOLDER)?);
        let ram = fs::metadata(folder.join("ram")).ok()?;
        Some(Watched {
            folder,
            device: ram.dev(),
            inode: ram.ino(),
        })
    };
    WATCHED.get_or_init(find).as_ref()
}

impl Watched {
    fn is(&self, fd: c_int) -> bool {
        // SAFETY: stat is plain data, for which all zeroes are valid; fstat fills it.
        let mut found: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `found` lives through the call.
        let done = unsafe { libc::fstat(fd, &mut found) };
        done == 0 && (found.st_dev, found.st_ino) == (self.device, self.inode)
    }
}

/// Stands before the C library's function of this name.
///
/// # Safety
/// As mmap(2).
#[no_mangle]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    if fd >= 0 && flags & libc::MAP_PRIVATE != 0 && protection & libc::PROT_WRITE != 0 {
        if let Some(watched) = watched().filter(|watched| watched.is(fd)) {
            return lay(watched, at, length, protection, flags).unwrap_or_else(|error| {
                eprintln!("agentenv-map: {error}");
                libc::MAP_FAILED
            });
        }
    }
    // SAFETY: the caller's promise.
    unsafe { system_mmap(at, length, protection, flags, fd, offset) }
}

/// Programs with 64-bit offsets call it by this name.
///
/// # Safety
/// As mmap(2).
#[no_mangle]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { mmap(at, length, protection, flags, fd, offset) }
}

/// # Safety
/// As mmap(2).
unsafe fn system_mmap(
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's promise; the kernel checks the rest.
    unsafe {
        libc::syscall(libc::SYS_mmap, at, length, protection, flags, fd, offset) as *mut c_void
    }
}

/// The whole mapping: anonymous, then the pieces over it.
fn lay(
    watched: &Watched,
    at: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
) -> io::Result<*mut c_void> {
    let text = fs::read_to_string(watched.folder.join("map"))?;
    let map = Map::parse(&text)?;
    let keep = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE);
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | keep;
    // SAFETY: the caller asked for a mapping there; with MAP_FIXED it owns what it replaces.
    let base = unsafe { system_mmap(at, length, protection, anonymous, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // One page of a guest must not take 512 from the host.
    // SAFETY: the mapping just made; advice changes no content.
    unsafe { libc::madvise(base, length, libc::MADV_NOHUGEPAGE) };
    let files: io::Result<Vec<c_int>> = map.files.iter().map(|path| open(path)).collect();
    let files = files?;
    for piece in &map.pieces {
        if piece
            .at
            .checked_add(piece.bytes)
            .is_none_or(|end| end > length)
        {
            return Err(invalid("a piece ends behind the memory"));
        }
        let private = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: inside the mapping just made.
        let done = unsafe {
            let at = base.cast::<u8>().add(piece.at).cast();
            system_mmap(
                at,
                piece.bytes,
                protection,
                private,
                files[piece.file],
                piece.offset,
            )
        };
        if done == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
    }
    for file in files {
        // SAFETY: opened above; mappings do not need it.
        unsafe { libc::close(file) };
    }
    fs::write(
        watched.folder.join("at"),
        format!("{} {length}\n", base as usize),
    )?;
    Ok(base)
}

fn open(path: &Path) -> io::Result<c_int> {
    let name =
        CString::new(path.as_os_str().as_bytes()).map_err(|_| invalid("a path holds a NUL"))?;
    // SAFETY: a string that ends in NUL.
    let fd = unsafe { libc::open(name.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if fd < 0 {
        let error = io::Error::last_os_error();
        return Err(io::Error::new(
            error.kind(),
            format!("{}: {error}", path.display()),
        ));
    }
    Ok(fd)
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

struct Piece {
    at: usize,
    bytes: usize,
    file: usize,
    offset: off_t,
}

struct Map {
    files: Vec<PathBuf>,
    pieces: Vec<Piece>,
}

impl Map {
    fn parse(text: &str) -> io::Result<Self> {
        let mut lines = text.lines();
        if lines.next() != Some(HEAD) {
            return Err(invalid("the memory's map is of another version"));
        }
        let mut map = Self {
            files: Vec::new(),
            pieces: Vec::new(),
        };
        for line in lines {
            match line.split_once(' ') {
                Some(("f", path)) => map.files.push(path.into()),
                Some(("p", numbers)) => map.pieces.push(map.piece(numbers)?),
                _ => return Err(invalid("the memory's map has a line of no kind")),
            }
        }
        Ok(map)
    }

    fn piece(&self, text: &str) -> io::Result<Piece> {
        let numbers: Result<Vec<usize>, _> = text.split(' ').map(str::parse).collect();
        let Ok([at, bytes, file, offset]) = numbers.as_deref() else {
            return Err(invalid("a piece of the memory's map has not four numbers"));
        };
        if *file >= self.files.len() {
            return Err(invalid("a piece of the memory's map is of no file"));
        }
        let offset = off_t::try_from(*offset).map_err(|_| invalid("an offset is too large"))?;
        Ok(Piece {
            at: *at,
            bytes: *bytes,
            file: *file,
            offset,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_of_files_and_pieces() {
        let map =
            Map::parse("agentenv-map 1\nf /a b\nf /c\np 0 4096 1 8192\np 8192 4096 0 0\n").unwrap();
        assert_eq!(map.files, [Path::new("/a b"), Path::new("/c")]);
        let found: Vec<_> = map
            .pieces
            .iter()
            .map(|p| (p.at, p.bytes, p.file, p.offset))
            .collect();
        assert_eq!(found, [(0, 4096, 1, 8192), (8192, 4096, 0, 0)]);
    }

    #[test]
    fn what_is_no_map_is_refused() {
        for text in [
            "",
            "agentenv-map 2\n",
            "agentenv-map 1\nx 1\n",
            "agentenv-map 1\np 0 4096 0 0\n",
            "agentenv-map 1\nf /a\np 0 4096 0\n",
            "agentenv-map 1\nf /a\np 0 4096 0 -1\n",
        ] {
            assert!(Map::parse(text).is_err(), "{text:?}");
        }
    }
}
