//! The file systems of a sandbox: image (EROFS, read-only) under a writable disk (ext4) as one root.

use std::fs::{self, File};
use std::os::unix::fs::{symlink, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::state::Layers;
use crate::sys;

const NODEV_NOEXEC_NOSUID: u64 = libc::MS_NODEV | libc::MS_NOEXEC | libc::MS_NOSUID;
/// Drivers probe when they are loaded; this only bounds a machine that lacks a disk.
const DISK_DEADLINE: Duration = Duration::from_secs(10);

fn mount(source: &str, target: &str, kind: &str, flags: u64, data: &str) -> Result<(), String> {
    sys::mount(source, target, kind, flags, data)
        .map_err(|error| format!("{kind} on {target} cannot be mounted: {error}"))
}

fn folder(path: &str) -> Result<(), String> {
    fs::create_dir_all(path).map_err(|error| format!("{path} cannot be made: {error}"))
}

/// What module loading and the search for disks need.
pub fn early() -> Result<(), String> {
    for path in ["/proc", "/sys", "/dev"] {
        folder(path)?;
    }
    mount("devtmpfs", "/dev", "devtmpfs", libc::MS_NOSUID, "mode=0755")?;
    mount("proc", "/proc", "proc", NODEV_NOEXEC_NOSUID, "")?;
    mount("sysfs", "/sys", "sysfs", NODEV_NOEXEC_NOSUID, "")
}

/// Assemble the root and move into it; its layers, which are out of reach then.
pub fn root() -> Result<Layers, String> {
    for path in ["/image", "/disk", "/root"] {
        folder(path)?;
    }
    let (image, disk) = (wait_for_disk("root")?, wait_for_disk("disk")?);
    mount(&image, "/image", "erofs", libc::MS_RDONLY, "")?;
    // The blank disk is all zeroes: nothing is left for the kernel to initialise by and by.
    mount(&disk, "/disk", "ext4", libc::MS_NOATIME, "noinit_itable")?;
    let open = |path: &str| File::open(path).map_err(|error| format!("{path}: {error}"));
    let kept = Layers {
        disk: open("/disk")?,
        image: open("/image")?,
    };
    folder("/disk/upper")?;
    folder("/disk/work")?;
    // The root folder's own mode and owner are the image's.
    if let Ok(image) = fs::metadata("/image") {
        let mode = fs::Permissions::from_mode(image.permissions().mode() & 0o7777);
        let _ = fs::set_permissions("/disk/upper", mode);
    }
    let layers = "lowerdir=/image,upperdir=/disk/upper,workdir=/disk/work,metacopy=off,index=off";
    mount("overlay", "/root", "overlay", libc::MS_NOATIME, layers)?;
    for path in ["/root/proc", "/root/sys", "/root/dev"] {
        folder(path)?;
    }
    for name in ["dev", "proc", "sys"] {
        mount(
            &format!("/{name}"),
            &format!("/root/{name}"),
            "",
            libc::MS_MOVE,
            "",
        )?;
    }
    std::env::set_current_dir("/root").map_err(|error| error.to_string())?;
    mount(".", "/", "", libc::MS_MOVE, "")?;
    sys::chroot(".").map_err(|error| format!("chroot: {error}"))?;
    std::env::set_current_dir("/").map_err(|error| error.to_string())?;
    Ok(kept)
}

/// The rest of what programs expect. An image can be odd: what fails is said and left.
pub fn system() {
    let wanted = [
        (
            "devpts",
            "/dev/pts",
            "devpts",
            libc::MS_NOSUID | libc::MS_NOEXEC,
            "gid=5,mode=620,ptmxmode=666",
        ),
        (
            "tmpfs",
            "/dev/shm",
            "tmpfs",
            libc::MS_NOSUID | libc::MS_NODEV,
            "mode=1777",
        ),
        ("mqueue", "/dev/mqueue", "mqueue", NODEV_NOEXEC_NOSUID, ""),
        (
            "tmpfs",
            "/run",
            "tmpfs",
            libc::MS_NOSUID | libc::MS_NODEV,
            "mode=0755,size=20%",
        ),
        (
            "cgroup2",
            "/sys/fs/cgroup",
            "cgroup2",
            NODEV_NOEXEC_NOSUID,
            // favordynmods: each command enters a group, which otherwise waits for a grace period.
            "nsdelegate,favordynmods",
        ),
    ];
    for (source, target, kind, flags, data) in wanted {
        if let Err(message) = folder(target).and_then(|()| mount(source, target, kind, flags, data))
        {
            println!("agentenv-init: {message}");
        }
    }
    // A watch is an inotify instance; the kernel's default of 128 is for all of root's.
    let _ = fs::write("/proc/sys/fs/inotify/max_user_instances", "8192");
    shared();
}

/// What of it every sandbox needs, whoever mounted its file systems.
pub fn shared() {
    shared_tmp("/tmp");
    shared_tmp("/var/tmp");
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        let _ = symlink(target, link);
    }
}

/// A folder for everyone's temporary files, where the image has none; an image's own stays as it is.
fn shared_tmp(path: &str) {
    if !Path::new(path).exists() && fs::create_dir_all(path).is_ok() {
        let _ = fs::set_permissions(path, fs::Permissions::from_mode(0o1777));
    }
}

/// The device of the virtio disk whose serial is `name`.
fn wait_for_disk(name: &str) -> Result<String, String> {
    let begun = Instant::now();
    loop {
        if let Some(path) = find_disk(name) {
            return Ok(path.to_string_lossy().into_owned());
        }
        if begun.elapsed() > DISK_DEADLINE {
            return Err(format!("the machine has no disk named {name}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn find_disk(name: &str) -> Option<PathBuf> {
    fs::read_dir("/sys/block")
        .ok()?
        .flatten()
        .find_map(|entry| {
            let serial = fs::read_to_string(entry.path().join("serial")).ok()?;
            let device = Path::new("/dev").join(entry.file_name());
            (serial.trim() == name && device.exists()).then_some(device)
        })
}
