//! What each control operation does.

use std::collections::HashMap;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use agentenv_wire::{Fault, Init, Op, PROTOCOL};
use serde_json::{json, Value};

use super::{identity, network};
use crate::state::Agent;
use crate::sys;

/// Between SIGTERM and SIGKILL at shutdown.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
const FIFREEZE: libc::c_ulong = 0xC004_5877;
const FITHAW: libc::c_ulong = 0xC004_5878;

fn fault(code: &'static str) -> impl Fn(std::io::Error) -> Fault {
    move |error| Fault {
        code,
        message: error.to_string(),
    }
}

pub fn perform(op: Op, agent: &Arc<Agent>) -> Result<Value, Fault> {
    match op {
        Op::Hello(_) => Ok(hello(agent)),
        Op::Init(init) => initialise(*init, agent),
        Op::Ping(_) => Ok(json!({})),
        Op::Clock(clock) => {
            sys::set_clock(clock.time_ns).map_err(fault("clock"))?;
            Ok(json!({"clock_error_ns": now_ns() - clock.time_ns}))
        }
        Op::Stats(_) => Ok(stats()),
        Op::Sync(_) => {
            sys::sync();
            Ok(json!({}))
        }
        Op::Freeze(_) => freeze(FIFREEZE),
        Op::Thaw(_) => freeze(FITHAW),
        Op::Shutdown(_) => {
            std::thread::spawn(shut_down);
            Ok(json!({}))
        }
    }
}

fn hello(agent: &Agent) -> Value {
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let init = agent.init();
    json!({
        "protocol": PROTOCOL,
        "version": env!("CARGO_PKG_VERSION"),
        "boot_id": boot_id.trim(),
        "initialised": init.is_some(),
        "generation": init.map_or(0, |init| init.generation),
    })
}

/// Identity first, then the token becomes valid: nobody is served by a half-made guest.
fn initialise(init: Init, agent: &Arc<Agent>) -> Result<Value, Fault> {
    if agent.is_guest() {
        sys::set_clock(init.time_ns).map_err(fault("clock"))?;
    }
    let clock_error = now_ns() - init.time_ns;
    let reseeded = agent.is_guest() && identity::reseed(&init.entropy).is_ok();
    if agent.is_guest() {
        identity::assume(&init);
        if let Some(wanted) = &init.network {
            network::configure(wanted).map_err(fault("network"))?;
        }
        for path in &init.volumes {
            let _ = fs::create_dir_all(path);
        }
    }
    agent.remember(init).map_err(fault("memory"))?;
    let user = agent.default_user().map_err(|message| Fault {
        code: "user",
        message,
    })?;
    Ok(json!({
        "clock_error_ns": clock_error,
        "entropy_reseeded": reseeded,
        "default_user": user.name,
        "home": user.home,
    }))
}

fn now_ns() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_nanos() as i64)
}

/// Figures of the whole guest: times in seconds, sizes in bytes.
pub fn stats() -> Value {
    let memory = meminfo();
    let field = |name: &str| memory.get(name).copied().unwrap_or(0);
    let (disk_total, disk_free) = sys::disk_space(Path::new("/")).unwrap_or((0, 0));
    let (busy, total) = cpu_times();
    json!({
        "cpu_count": std::thread::available_parallelism().map_or(1, usize::from),
        "cpu_busy_s": busy,
        "cpu_total_s": total,
        "mem_total": field("MemTotal"),
        "mem_used": field("MemTotal").saturating_sub(field("MemAvailable")),
        "mem_cache": field("Cached"),
        "disk_total": disk_total,
        "disk_used": disk_total.saturating_sub(disk_free),
    })
}

fn meminfo() -> HashMap<String, u64> {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let (name, rest) = line.split_once(':')?;
            let kib: u64 = rest.split_whitespace().next()?.parse().ok()?;
            Some((name.to_owned(), kib * 1024))
        })
        .collect()
}

/// Busy and total seconds of all CPUs since boot (first line of /proc/stat, in ticks of 10 ms).
fn cpu_times() -> (f64, f64) {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let first = text.lines().next().unwrap_or_default();
    let ticks: Vec<f64> = first
        .split_whitespace()
        .skip(1)
        .take(8)
        .filter_map(|n| n.parse().ok())
        .collect();
    let total: f64 = ticks.iter().sum();
    let idle: f64 = ticks.iter().skip(3).take(2).sum();
    ((total - idle) / 100.0, total / 100.0)
}

/// Freeze or thaw the root, which reaches the writable disk below the overlay.
fn freeze(request: libc::c_ulong) -> Result<Value, Fault> {
    let root = fs::File::open("/").map_err(fault("freeze"))?;
    sys::ioctl(root.as_raw_fd(), request, &mut 0_i32).map_err(fault("freeze"))?;
    Ok(json!({}))
}

/// End everything but init and us, then the machine.
fn shut_down() {
    if std::process::id() == 1 || std::os::unix::process::parent_id() != 1 {
        return;
    }
    let us = std::process::id() as libc::pid_t;
    signal_all(us, libc::SIGTERM);
    let deadline = Instant::now() + SHUTDOWN_GRACE;
    while Instant::now() < deadline && !others(us).is_empty() {
        std::thread::sleep(Duration::from_millis(20));
    }
    signal_all(us, libc::SIGKILL);
    sys::power_off()
}

fn others(us: libc::pid_t) -> Vec<libc::pid_t> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        // Kernel threads have no command line.
        .filter(|pid| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|text| !text.is_empty()))
        .filter(|pid| *pid != 1 && *pid != us)
        .collect()
}

fn signal_all(us: libc::pid_t, signal: libc::c_int) {
    for pid in others(us) {
        let _ = sys::kill(pid, signal);
    }
}
