//! What the kernel says of a process: CPU time, memory, threads. Linux only, from `/proc`
//! (<https://man7.org/linux/man-pages/man5/proc.5.html>).

use std::fs;
use std::time::Duration;

use anyhow::Context as _;

/// Clock ticks a second of `/proc/<pid>/stat`: 100 on every Linux that Halocline runs on
/// (`getconf CLK_TCK`).
const TICKS_A_SECOND: u64 = 100;

/// User and system time used so far, all threads together.
pub fn cpu_time(pid: u32) -> anyhow::Result<Duration> {
    let path = format!("/proc/{pid}/schedstat");
    // Nanoseconds, of the main thread alone: so the threads' own are summed where they can be read.
    let tasks = format!("/proc/{pid}/task");
    let mut nanos = 0;
    let mut threads = 0;
    for task in fs::read_dir(&tasks).with_context(|| format!("no process {pid}"))? {
        let schedstat = task?.path().join("schedstat");
        if let Ok(text) = fs::read_to_string(schedstat)
            && let Some(run) = text.split_whitespace().next().and_then(|n| n.parse::<u64>().ok())
        {
            nanos += run;
            threads += 1;
        }
    }
    if threads > 0 && nanos > 0 {
        return Ok(Duration::from_nanos(nanos));
    }
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).with_context(|| path)?;
    // The name in parentheses may hold spaces.
    let fields: Vec<&str> =
        text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    Ok(Duration::from_millis((ticks(11) + ticks(12)) * 1000 / TICKS_A_SECOND))
}

/// Resident memory in bytes, from `VmRSS`.
pub fn resident_bytes(pid: u32) -> anyhow::Result<u64> {
    Ok(status_number(pid, "VmRSS:")? * 1024)
}

/// Number of threads.
pub fn threads(pid: u32) -> anyhow::Result<u64> {
    status_number(pid, "Threads:")
}

fn status_number(pid: u32, field: &str) -> anyhow::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    text.lines()
        .find_map(|line| line.strip_prefix(field))
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|n| n.parse().ok())
        .with_context(|| format!("/proc/{pid}/status has no {field}"))
}
