//! Readers that are killed while they wait, and servers that are. Needs root and Linux 6.9.

mod support;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::process::{kill_process, Pid, Signal};
use support::{example, noise, until, Mounted, Scratch, Served, Shared};

const MODES: [&str; 4] = ["read", "direct", "mmap", "mmap-random"];

fn reader(path: &Path, mode: &str) -> Child {
    Command::new(example("reader"))
        .args([path.as_os_str(), mode.as_ref()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn read_all(mut child: Child) -> Vec<u8> {
    let mut bytes = vec![];
    child
        .stdout
        .take()
        .unwrap()
        .read_to_end(&mut bytes)
        .unwrap();
    assert!(child.wait().unwrap().success());
    bytes
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn a_killed_reader_goes_away_while_its_read_waits() {
    for mode in MODES {
        let served = Served::new(Shared::new(vec![("held", noise(1, 4096))]));
        let mut child = reader(&served.path("held"), mode);
        until("the read", || served.files.waiting() > 0);
        child.kill().unwrap();
        until(mode, || child.try_wait().unwrap().is_some());
    }
}

#[test]
fn a_signal_that_does_not_kill_leaves_the_read_waiting() {
    for mode in MODES {
        let served = Served::new(Shared::new(vec![("held", noise(2, 4096))]));
        let child = reader(&served.path("held"), mode);
        until("the read", || served.files.waiting() > 0);
        for _ in 0..5 {
            signal(&child, Signal::USR1);
            std::thread::sleep(Duration::from_millis(30));
        }
        assert_eq!(served.files.cancelled(), 0);
        served.files.let_go();
        assert!(read_all(child) == noise(2, 4096), "{mode}");
    }
}

/// The kernel says INTERRUPT only once, for the first signal.
#[test]
fn a_kill_after_another_signal_is_seen_too() {
    let served = Served::new(Shared::new(vec![("held", noise(3, 4096))]));
    let mut child = reader(&served.path("held"), "direct");
    until("the read", || served.files.waiting() > 0);
    signal(&child, Signal::USR1);
    std::thread::sleep(Duration::from_millis(100));
    child.kill().unwrap();
    until("the end", || child.try_wait().unwrap().is_some());
    assert_eq!(served.files.cancelled(), 1);
}

#[test]
fn every_open_is_released_and_a_mount_that_goes_ends_the_server() {
    let served = Served::new(Shared::new(vec![("a", vec![1; 10]), ("held", vec![2; 10])]));
    for _ in 0..3 {
        fs::read(served.path("a")).unwrap();
    }
    until("releases", || {
        served.files.0.releases.load(Ordering::SeqCst) == 3
    });
}

/// A folder served by another process, which may be killed and come again.
struct Away {
    mounted: Mounted,
    scratch: Scratch,
    kind: &'static str,
    server: Child,
}

impl Away {
    fn new(kind: &'static str) -> Self {
        let (mounted, scratch) = (Mounted::new(), Scratch::new());
        fs::create_dir(scratch.0.join("files")).unwrap();
        fs::write(scratch.0.join("files/a"), noise(7, 1 << 20)).unwrap();
        fs::write(scratch.0.join("files/b"), noise(8, 1 << 20)).unwrap();
        let server = start(&mounted, &scratch, kind, "0");
        fs::metadata(&mounted.path).unwrap();
        Self {
            mounted,
            scratch,
            kind,
            server,
        }
    }

    fn crash(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
    }

    fn adopt(&mut self) {
        self.server = start(&self.mounted, &self.scratch, self.kind, "1");
    }
}

fn start(mounted: &Mounted, scratch: &Scratch, kind: &str, restarts: &str) -> Child {
    Command::new(example("folder"))
        .arg("0")
        .args([scratch.0.join("files"), scratch.0.join("state")])
        .arg(kind)
        .env("AENV_RESTARTS", restarts)
        .stdin(Stdio::from(mounted.fd.try_clone().unwrap()))
        .spawn()
        .unwrap()
}

impl Drop for Away {
    fn drop(&mut self) {
        self.crash();
    }
}

#[test]
fn reads_in_flight_outlive_a_killed_server_again_and_again() {
    for mode in MODES {
        let mut away = Away::new("cached");
        let open = File::open(away.mounted.path.join("b")).unwrap();
        let hold = away.scratch.0.join("state.hold");
        fs::write(&hold, "").unwrap();
        let child = reader(&away.mounted.path.join("a"), mode);
        for _ in 0..2 {
            let reading = away.scratch.0.join("state.reading");
            until("the read", || reading.exists());
            away.crash();
            fs::remove_file(reading).unwrap();
            away.adopt();
        }
        fs::remove_file(&hold).unwrap();
        assert!(read_all(child) == noise(7, 4096), "{mode}");
        let mut late = vec![0; 1 << 20];
        open.read_exact_at(&mut late, 0).unwrap();
        assert!(late == noise(8, 1 << 20));
        drop(open);
        assert!(fs::read(away.mounted.path.join("a")).unwrap() == noise(7, 1 << 20));
    }
}

#[test]
fn a_reader_killed_between_two_servers_goes_away() {
    let mut away = Away::new("cached");
    fs::write(away.scratch.0.join("state.hold"), "").unwrap();
    let mut child = reader(&away.mounted.path.join("a"), "mmap");
    until("the read", || away.scratch.0.join("state.reading").exists());
    away.crash();
    child.kill().unwrap();
    until("the end", || child.try_wait().unwrap().is_some());
    away.adopt();
    fs::remove_file(away.scratch.0.join("state.hold")).unwrap();
    assert!(fs::read(away.mounted.path.join("a")).unwrap() == noise(7, 1 << 20));
}

#[test]
fn open_passthrough_files_work_without_a_server_and_open_again_after() {
    let mut away = Away::new("passthrough");
    let path = away.mounted.path.join("a");
    let open = File::open(&path).unwrap();
    away.crash();
    let mut bytes = vec![0; 1 << 20];
    open.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == noise(7, 1 << 20));
    away.adopt();
    // The same backing id, kept by the folder's state: another would be refused while `open` lives.
    assert!(fs::read(&path).unwrap() == noise(7, 1 << 20));
    open.read_exact_at(&mut bytes, 0).unwrap();
    assert!(fs::read(away.mounted.path.join("b")).unwrap() == noise(8, 1 << 20));
}

#[test]
fn a_server_killed_before_init_is_followed_by_one_that_answers_it() {
    let (mounted, scratch) = (Mounted::new(), Scratch::new());
    fs::create_dir(scratch.0.join("files")).unwrap();
    fs::write(scratch.0.join("files/a"), noise(9, 5000)).unwrap();
    let mut message = [0; 64 << 10];
    assert!(rustix::io::read(&mounted.fd, &mut message).unwrap() > 40);
    let mut server = start(&mounted, &scratch, "cached", "1");
    let content = fs::read(mounted.path.join("a"));
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(content.unwrap() == noise(9, 5000));
}
