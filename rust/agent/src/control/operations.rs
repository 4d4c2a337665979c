//! What each control operation does.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agentenv_wire::{Fault, Op, PROTOCOL};
use serde_json::{json, Value};

use super::{disk, fault, generation, now_ns};
use crate::state::Agent;
use crate::sys;

/// Between SIGTERM and SIGKILL at shutdown.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

pub fn perform(op: Op, agent: &Arc<Agent>) -> Result<Value, Fault> {
    match op {
        Op::Hello(_) => Ok(hello(agent)),
        Op::Init(init) => generation::initialise(*init, agent),
        Op::Ping(_) => Ok(json!({})),
        Op::Clock(clock) => {
            sys::set_clock(clock.time_ns).map_err(fault("clock"))?;
            Ok(json!({"clock_error_ns": now_ns() - clock.time_ns}))
        }
        Op::Stats(_) => Ok(stats(agent)),
        Op::Sync(_) => {
            sys::sync();
            Ok(json!({}))
        }
        Op::Freeze(_) => with_disk(agent, disk::freeze, "freeze"),
        Op::Thaw(_) => with_disk(agent, disk::thaw, "thaw"),
        Op::Suspend(args) => suspend(agent, Duration::from_millis(args.deadline_ms)),
        Op::Release(_) => {
            agent.go_on();
            let processes = agent.freezer.release().map_err(fault("release"))?;
            Ok(json!({"processes": processes}))
        }
        Op::Shutdown(_) => {
            std::thread::spawn(shut_down);
            Ok(json!({}))
        }
    }
}

fn with_disk(
    agent: &Agent,
    work: fn(&File) -> io::Result<()>,
    code: &'static str,
) -> Result<Value, Fault> {
    let done = agent.layers().and_then(|layers| work(&layers.disk));
    done.map(|()| json!({})).map_err(fault(code))
}

fn suspend(agent: &Agent, patience: Duration) -> Result<Value, Fault> {
    let done = agent.freezer.suspend(patience).map_err(fault("suspend"))?;
    if agent.is_container() {
        agent.be_still().map_err(fault("suspend"))?;
    }
    Ok(json!({"frozen": done.all, "processes": done.processes}))
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
        "suspended": agent.freezer.is_suspended(),
    })
}

/// Figures of the whole guest: times in seconds, sizes in bytes.
pub fn stats(agent: &Agent) -> Value {
    let memory = meminfo();
    let field = |name: &str| memory.get(name).copied().unwrap_or(0);
    let (disk_total, disk_free) = sys::disk_space(Path::new("/")).unwrap_or((0, 0));
    let (mut memory_total, mut disk_size) = (field("MemTotal"), disk_total);
    if let Some(init) = agent.init().filter(|_| agent.is_container()) {
        (memory_total, disk_size) = (init.memory_bytes, init.disk_bytes);
    }
    let (busy, total) = cpu_times();
    json!({
        "cpu_count": std::thread::available_parallelism().map_or(1, usize::from),
        "cpu_busy_s": busy,
        "cpu_total_s": total,
        "mem_total": memory_total,
        "mem_used": field("MemTotal").saturating_sub(field("MemAvailable")),
        "mem_cache": field("Cached"),
        "disk_total": disk_size,
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
