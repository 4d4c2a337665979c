//! What the transport costs: a server that answers from memory, in this process. Run as root with
//! `cargo run --release -p agentenv-fuse --example bench`.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use agentenv_fuse::{Attr, Connection, Errno, Files, Opened, ReadReply, Start};

#[path = "../tests/support/mod.rs"]
mod support;
use support::{noise, Mounted, Scratch};

const SIZE: usize = 512 << 20;
const PAGE: usize = 4096;
const PIECE: usize = 1 << 20;
const SAMPLES: usize = 40_000;
const THREADS: usize = 2;

/// `cold` (2) and `through` (3), both the same bytes.
struct Bytes {
    data: Vec<u8>,
    backing: Mutex<Option<i32>>,
}

impl Files for Bytes {
    fn lookup(&self, name: &[u8]) -> Option<Attr> {
        self.attr(if name == b"cold" { 2 } else { 3 })
    }

    fn attr(&self, node: u64) -> Option<Attr> {
        let size = SIZE as u64;
        Some(Attr { node, size })
    }

    fn list(&self) -> Vec<(Vec<u8>, Attr)> {
        vec![]
    }

    fn open(&self, node: u64) -> Result<Opened, Errno> {
        let backing = *self.backing.lock().expect("no panic under the lock");
        let passthrough = backing.filter(|_| node == 3);
        Ok(Opened { passthrough })
    }

    fn release(&self, _: u64) {}

    fn read(&self, _: u64, offset: u64, size: u32, reply: ReadReply) {
        reply.data(&self.data[offset as usize..][..size as usize]);
    }
}

fn sequential(file: &File) -> f64 {
    let mut piece = vec![0; PIECE];
    let start = Instant::now();
    for offset in (0..SIZE).step_by(PIECE) {
        file.read_exact_at(&mut piece, offset as u64)
            .expect("a read");
    }
    SIZE as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Median and 99th percentile in µs of reads of single pages, each read for the first time.
fn cold_pages(file: &File) -> (f64, f64) {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random).expect("advice");
    let mut page = [0; PAGE];
    let mut times: Vec<f64> = (0..SAMPLES)
        .map(|number| {
            let offset = number * 7919 % (SIZE / PAGE) * PAGE;
            let start = Instant::now();
            file.read_exact_at(&mut page, offset as u64)
                .expect("a read");
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[SAMPLES / 2], times[SAMPLES / 100 * 99])
}

fn main() {
    let (mounted, scratch) = (Mounted::new(), Scratch::new());
    let bytes = Arc::new(Bytes {
        data: noise(1, SIZE),
        backing: Mutex::default(),
    });
    let plain = scratch.0.join("plain");
    fs::write(&plain, &bytes.data).expect("room on the disk");
    let plain = File::open(plain).expect("the file");
    plain
        .sync_all()
        .expect("written back, so that it does not disturb");
    let connection = Connection::new(mounted.fd.try_clone().expect("a descriptor"));
    let (serving, files) = (connection.clone(), bytes.clone());
    let server = std::thread::spawn(move || serving.serve(files, THREADS, Start::Fresh));
    let cold = File::open(mounted.path.join("cold")).expect("the file");
    mounted.raise_read_ahead();
    let (median, slow) = cold_pages(&cold);
    println!("cold 4 KiB pread      {median:6.2} µs median, {slow:.2} µs p99");
    connection.invalidate(2).expect("invalidated");
    rustix::fs::fadvise(&cold, 0, None, rustix::fs::Advice::Normal).expect("advice");
    println!("sequential, cold      {:6.2} GB/s", sequential(&cold));
    connection.invalidate(2).expect("invalidated");
    println!("sequential, cold      {:6.2} GB/s", sequential(&cold));
    println!("sequential, cached    {:6.2} GB/s", sequential(&cold));
    let id = connection.backing_open(&plain).expect("passthrough");
    *bytes.backing.lock().expect("no panic under the lock") = Some(id);
    let through = File::open(mounted.path.join("through")).expect("the file");
    println!("passthrough, cached   {:6.2} GB/s", sequential(&through));
    println!("plain file, cached    {:6.2} GB/s", sequential(&plain));
    drop((cold, through, mounted));
    server
        .join()
        .expect("no panic")
        .expect("an end with the mount");
}
