//! A mount in a temporary folder, and files in memory to serve there.
#![allow(dead_code)] // each test program uses its part

use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use agentenv_fuse::{Attr, Connection, Errno, Files, Opened, ReadReply, Start};
use rustix::mount::{mount, unmount, MountFlags, UnmountFlags};

pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = format!("/var/tmp/agentenv-fuse-{}-{number}", std::process::id());
        fs::create_dir(&path).unwrap();
        Self(path.into())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// Mounted until dropped.
pub struct Mounted {
    pub path: PathBuf,
    pub fd: OwnedFd,
    _scratch: Scratch,
}

impl Mounted {
    pub fn new() -> Self {
        let scratch = Scratch::new();
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let fd: OwnedFd = device.unwrap().into();
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
            fd.as_raw_fd()
        );
        let options = CString::new(options).unwrap();
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount(
            "agentenv",
            &scratch.0,
            "fuse",
            flags,
            Some(options.as_c_str()),
        )
        .unwrap();
        Self {
            path: scratch.0.clone(),
            fd,
            _scratch: scratch,
        }
    }

    pub fn raise_read_ahead(&self) {
        let device = fs::metadata(&self.path).unwrap().dev();
        let (major, minor) = (libc::major(device), libc::minor(device));
        let key = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
        fs::write(key, "1024").unwrap();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        unmount(&self.path, UnmountFlags::DETACH).unwrap();
    }
}

/// Files in memory, nodes 2, 3, … in order. Reads of `held*` wait for `let_go`; `panic*` panics.
#[derive(Default)]
pub struct Memory {
    pub files: Vec<(String, Arc<Vec<u8>>)>,
    pub backing: Mutex<Option<i32>>,
    pub sizes: Mutex<Vec<u32>>,
    pub cancelled: AtomicU64,
    pub releases: AtomicU64,
    pub hidden: Mutex<Vec<String>>,
    held: Mutex<Vec<Held>>,
}

type Slot = Arc<Mutex<Option<ReadReply>>>;

struct Held {
    slot: Slot,
    data: Arc<Vec<u8>>,
    range: std::ops::Range<usize>,
}

#[derive(Clone, Default)]
pub struct Shared(pub Arc<Memory>);

impl Shared {
    pub fn new(files: Vec<(&str, Vec<u8>)>) -> Self {
        let named = |(name, data): (&str, Vec<u8>)| (name.to_owned(), Arc::new(data));
        Self(Arc::new(Memory {
            files: files.into_iter().map(named).collect(),
            ..Memory::default()
        }))
    }

    pub fn reads(&self) -> usize {
        self.0.sizes.lock().unwrap().len()
    }

    pub fn waiting(&self) -> usize {
        self.0.held.lock().unwrap().len()
    }

    pub fn cancelled(&self) -> u64 {
        self.0.cancelled.load(Ordering::SeqCst)
    }

    pub fn let_go(&self) {
        for held in self.0.held.lock().unwrap().drain(..) {
            if let Some(reply) = held.slot.lock().unwrap().take() {
                reply.data(&held.data[held.range]);
            }
        }
    }

    fn hold(&self, data: Arc<Vec<u8>>, range: std::ops::Range<usize>, reply: ReadReply) {
        let slot = Slot::default();
        let (cancelled, memory) = (slot.clone(), self.0.clone());
        let mut guard = slot.lock().unwrap();
        reply.on_cancel(Box::new(move || {
            memory.cancelled.fetch_add(1, Ordering::SeqCst);
            if let Some(reply) = cancelled.lock().unwrap().take() {
                assert!(reply.cancelled());
                reply.error(Errno::INTR);
            }
        }));
        *guard = Some(reply);
        drop(guard);
        self.0.held.lock().unwrap().push(Held { slot, data, range });
    }
}

impl Files for Shared {
    fn lookup(&self, name: &[u8]) -> Option<Attr> {
        if self
            .0
            .hidden
            .lock()
            .unwrap()
            .iter()
            .any(|hidden| hidden.as_bytes() == name)
        {
            return None;
        }
        self.list()
            .into_iter()
            .find(|file| file.0 == name)
            .map(|file| file.1)
    }

    fn attr(&self, node: u64) -> Option<Attr> {
        let (_, data) = self.0.files.get(node as usize - 2)?;
        let size = data.len() as u64;
        Some(Attr { node, size })
    }

    fn list(&self) -> Vec<(Vec<u8>, Attr)> {
        let named = self.0.files.iter().zip(2..);
        named
            .map(|((name, _), node)| (name.clone().into(), self.attr(node).unwrap()))
            .collect()
    }

    fn open(&self, node: u64) -> Result<Opened, Errno> {
        assert_ne!(self.0.files[node as usize - 2].0, "panic-open", "wanted");
        let passthrough = *self.0.backing.lock().unwrap();
        Ok(Opened { passthrough })
    }

    fn release(&self, _: u64) {
        self.0.releases.fetch_add(1, Ordering::SeqCst);
    }

    fn read(&self, node: u64, offset: u64, size: u32, reply: ReadReply) {
        self.0.sizes.lock().unwrap().push(size);
        let (name, data) = &self.0.files[node as usize - 2];
        let range = offset as usize..offset as usize + size as usize;
        match &name[..] {
            "panic-read" => panic!("wanted"),
            "dropped" => drop(reply),
            "short" => reply.data(&data[range][1..]),
            held if held.starts_with("held") => self.hold(data.clone(), range, reply),
            _ => {
                let (left, right) = data[range].split_at(size as usize / 3);
                reply.slices(&[left, &[], right]);
            }
        }
    }
}

/// A mount served by this process. The mount goes first, which ends the server.
pub struct Served {
    pub mounted: Option<Mounted>,
    pub connection: Arc<Connection>,
    pub files: Shared,
    serving: Option<JoinHandle<std::io::Result<()>>>,
}

impl Served {
    pub fn new(files: Shared) -> Self {
        let mounted = Mounted::new();
        let connection = Connection::new(mounted.fd.try_clone().unwrap());
        let (serving, served) = (connection.clone(), Arc::new(files.clone()));
        let serving = std::thread::spawn(move || serving.serve(served, 4, Start::Fresh));
        fs::metadata(&mounted.path).unwrap(); // INIT is through
        Self {
            mounted: Some(mounted),
            connection,
            files,
            serving: Some(serving),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.mounted.as_ref().unwrap().path.join(name)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.files.let_go();
        self.mounted = None;
        let ended = self.serving.take().unwrap().join().unwrap();
        if !std::thread::panicking() {
            ended.expect("serving ends with the mount");
        }
    }
}

/// Bytes that differ everywhere, the same for the same seed.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_ne_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// One of the crate's example programs, which cargo builds with the tests.
pub fn example(name: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let target = own.parent().and_then(Path::parent).unwrap();
    target.join("examples").join(name)
}

/// Wait for something that will come; a test that hangs here has failed.
pub fn until(what: &str, mut come: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if come() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("never came: {what}");
}
