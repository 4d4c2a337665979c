//! What a reader sees, against the same bytes in memory. Needs root and Linux 6.9.

mod support;

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use rustix::mm::{mmap, munmap, MapFlags, ProtFlags};
use support::{noise, Scratch, Served, Shared};

const LARGE: usize = (9 << 20) + 12345;

/// A private mapping of a whole file, copied out.
fn mapped(file: &File, size: usize) -> Vec<u8> {
    // SAFETY: a fresh mapping of `size` bytes at an address of the kernel's choice; the file is that
    // long and immutable, nothing writes through the mapping, and no borrow of it outlives the copy.
    unsafe {
        let (read, private) = (ProtFlags::READ, MapFlags::PRIVATE);
        let start = mmap(std::ptr::null_mut(), size, read, private, file.as_fd(), 0).unwrap();
        let copy = std::slice::from_raw_parts(start.cast::<u8>(), size).to_vec();
        munmap(start, size).unwrap();
        copy
    }
}

#[test]
fn eight_threads_at_random_offsets_read_the_bytes() {
    let data = noise(1, LARGE);
    let served = Served::new(Shared::new(vec![("a", data.clone())]));
    std::thread::scope(|scope| {
        for seed in 0..8 {
            let (data, path) = (&data, served.path("a"));
            scope.spawn(move || {
                let file = File::open(path).unwrap();
                for pair in noise(seed + 10, 16 * 300).chunks(16) {
                    let word = |at: usize| u64::from_ne_bytes(pair[at..at + 8].try_into().unwrap());
                    let offset = word(0) as usize % LARGE;
                    let size = (word(8) as usize % 100_000).min(LARGE - offset);
                    let mut got = vec![0; size];
                    file.read_exact_at(&mut got, offset as u64).unwrap();
                    assert_eq!(got, data[offset..offset + size]);
                }
            });
        }
    });
    let file = File::open(served.path("a")).unwrap();
    assert!(mapped(&file, LARGE) == data);
    assert_eq!(file.read_at(&mut [0; 10], LARGE as u64).unwrap(), 0);
}

#[test]
fn pages_stay_between_opens_until_invalidated() {
    let data = noise(2, 1 << 20);
    let served = Served::new(Shared::new(vec![("a", data.clone())]));
    assert!(fs::read(served.path("a")).unwrap() == data);
    let reads = served.files.reads();
    assert!(reads > 0);
    assert!(fs::read(served.path("a")).unwrap() == data);
    assert_eq!(served.files.reads(), reads);
    served.connection.invalidate(2).unwrap();
    served.connection.invalidate(99).unwrap();
    assert!(fs::read(served.path("a")).unwrap() == data);
    assert!(served.files.reads() > reads);
}

#[test]
fn sequential_reads_come_in_large_requests() {
    let data = noise(3, LARGE);
    let served = Served::new(Shared::new(vec![("a", data.clone())]));
    served.mounted.as_ref().unwrap().raise_read_ahead();
    assert!(fs::read(served.path("a")).unwrap() == data);
    assert_eq!(
        served.files.0.sizes.lock().unwrap().iter().max(),
        Some(&(1 << 20))
    );
}

#[test]
fn the_folder_lists_and_describes_its_files() {
    let many: Vec<String> = (0..500)
        .map(|n| format!("file-{n:04}-{}", "x".repeat(200)))
        .collect();
    let files = many.iter().map(|name| (&name[..], vec![7; 1000])).collect();
    let served = Served::new(Shared::new(files));
    let folder = served.path("");
    let mut listed: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    listed.sort();
    assert_eq!(listed, many);
    let found = fs::metadata(served.path(&many[7])).unwrap();
    use std::os::unix::fs::MetadataExt;
    assert_eq!(
        (found.mode(), found.len(), found.uid()),
        (0o100_444, 1000, 0)
    );
    assert_eq!(fs::metadata(folder).unwrap().mode(), 0o040_555);
    let absent = fs::metadata(served.path("absent")).unwrap_err();
    assert_eq!(absent.kind(), io::ErrorKind::NotFound);
}

#[test]
fn nothing_can_be_changed() {
    let served = Served::new(Shared::new(vec![("a", vec![1])]));
    let refused = |error: io::Error| assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    refused(
        File::options()
            .write(true)
            .open(served.path("a"))
            .unwrap_err(),
    );
    refused(
        File::options()
            .read(true)
            .write(true)
            .open(served.path("a"))
            .unwrap_err(),
    );
    refused(File::create(served.path("new")).unwrap_err());
    refused(fs::remove_file(served.path("a")).unwrap_err());
    refused(fs::rename(served.path("a"), served.path("b")).unwrap_err());
    refused(fs::create_dir(served.path("d")).unwrap_err());
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    refused(fs::set_permissions(served.path("a"), mode).unwrap_err());
}

#[test]
fn a_forgotten_name_is_asked_for_again() {
    let served = Served::new(Shared::new(vec![("a", vec![5; 10])]));
    let open = File::open(served.path("a")).unwrap();
    served.files.0.hidden.lock().unwrap().push("a".into());
    assert!(fs::metadata(served.path("a")).is_ok(), "the name is cached");
    served.connection.forget_name(b"a").unwrap();
    served.connection.forget_name(b"never there").unwrap();
    assert!(fs::metadata(served.path("a")).is_err());
    let mut byte = [0];
    open.read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [5]);
}

#[test]
fn faults_of_the_server_are_errors_of_that_read_alone() {
    let names = ["panic-read", "panic-open", "dropped", "short", "sound"];
    let files = names.map(|name| (name, noise(4, 5000)));
    let served = Served::new(Shared::new(files.to_vec()));
    for name in &names[..4] {
        for _ in 0..8 {
            let error = fs::read(served.path(name)).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO), "{name}");
        }
    }
    assert!(fs::read(served.path("sound")).unwrap() == noise(4, 5000));
}

#[test]
fn passthrough_reads_never_reach_the_server() {
    let (scratch, data) = (Scratch::new(), noise(5, LARGE));
    let served = Served::new(Shared::new(vec![("a", data.clone())]));
    let with = served.connection.negotiated().unwrap();
    assert!(with.passthrough() && with.resend());
    fs::write(scratch.0.join("backing"), &data).unwrap();
    let backing = File::open(scratch.0.join("backing")).unwrap();
    let id = served.connection.backing_open(&backing).unwrap();
    *served.files.0.backing.lock().unwrap() = Some(id);
    let file = File::open(served.path("a")).unwrap();
    served.connection.backing_close(id).unwrap();
    assert!(served.connection.backing_close(id).is_err());
    assert!(mapped(&file, LARGE) == data);
    let mut got = vec![0; 100_000];
    file.read_exact_at(&mut got, 54321).unwrap();
    assert!(got == data[54321..154_321]);
    assert_eq!(served.files.reads(), 0);
    let (refused, _) = rustix::pipe::pipe().unwrap();
    assert!(served.connection.backing_open(&refused.into()).is_err());
}
