//! `agentenv._core`: thin bindings. They convert and release the interpreter lock.

mod layers;
mod objects;
mod pages;

use std::time::{Duration, Instant};

use pyo3::prelude::*;

const SPANS: usize = 5;

/// Ticks of the time stamp counter per millisecond, measured over `milliseconds`.
///
/// The kernel's own figure is only in its log; `cpu MHz` of /proc/cpuinfo is the current clock,
/// not the counter's rate. Over 20 ms the error is below 0.1 %; the median of several spans is
/// taken, because a span whose ends were interrupted between the two clocks may be far off.
#[pyfunction]
fn tsc_khz(py: Python<'_>, milliseconds: u64) -> u64 {
    let span = Duration::from_millis(milliseconds.clamp(1, 1000));
    let mut measured: Vec<u64> = py.detach(|| (0..SPANS).map(|_| measure(span)).collect());
    measured.sort_unstable();
    measured[SPANS / 2]
}

fn measure(span: Duration) -> u64 {
    let (begun, first) = (Instant::now(), read_tsc());
    std::thread::sleep(span);
    let ticks = read_tsc().wrapping_sub(first);
    (u128::from(ticks) * 1_000_000 / begun.elapsed().as_nanos()) as u64
}

#[cfg(target_arch = "x86_64")]
fn read_tsc() -> u64 {
    // SAFETY: RDTSC reads a counter and has no other effect; it exists on every x86_64 CPU.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn read_tsc() -> u64 {
    0
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<objects::Objects>()?;
    module.add(
        "ObjectsError",
        module.py().get_type::<objects::ObjectsError>(),
    )?;
    module.add_class::<layers::Layer>()?;
    module.add_class::<layers::WrittenLayer>()?;
    module.add_function(wrap_pyfunction!(layers::write_layer, module)?)?;
    module.add_function(wrap_pyfunction!(layers::unpack_layer, module)?)?;
    module.add_function(wrap_pyfunction!(layers::pack_chunks, module)?)?;
    module.add_function(wrap_pyfunction!(layers::repack, module)?)?;
    module.add_function(wrap_pyfunction!(layers::verify_chunks, module)?)?;
    module.add_function(wrap_pyfunction!(layers::stack_id, module)?)?;
    module.add_class::<pages::Pages>()?;
    module.add_class::<pages::HeldPages>()?;
    module.add_function(wrap_pyfunction!(pages::layer_runs, module)?)?;
    module.add_function(wrap_pyfunction!(pages::run_spans, module)?)?;
    module.add_function(wrap_pyfunction!(pages::merge_runs, module)?)?;
    module.add_function(wrap_pyfunction!(pages::memory_map, module)?)?;
    module.add_function(wrap_pyfunction!(tsc_khz, module)?)
}
