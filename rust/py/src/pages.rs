//! `agentenv._core`: a guest's memory saved, and laid out of layers again.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use agentenv_blocks::stack::{self, Top};
use agentenv_pages::{self as pages, Memory, Run, PAGE};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::layers::{damaged, Layer};

/// First page, pages, whether they are zeroes: 12 bytes a run, little-endian.
const RUN: usize = 12;

/// Pages that a process has to save.
#[pyclass(frozen, module = "agentenv._core")]
pub struct Pages {
    memory: Memory,
    runs: Vec<Run>,
}

#[pymethods]
impl Pages {
    /// Those of `size` bytes at address `at` of process `pid` that it changed; with `file` those
    /// that the memory file mapped there has.
    #[staticmethod]
    fn find(py: Python<'_>, pid: i32, at: u64, size: u64, file: bool) -> PyResult<Self> {
        let pages =
            u32::try_from(size / PAGE as u64).map_err(|_| PyValueError::new_err("too large"))?;
        let memory = Memory { pid, at, pages };
        let find = if file {
            pages::allocated
        } else {
            pages::changed
        };
        let runs = py.detach(|| find(memory)).map_err(os_error)?;
        Ok(Self { memory, runs })
    }

    #[getter]
    fn size(&self) -> u64 {
        self.runs
            .iter()
            .map(|run| u64::from(run.count))
            .sum::<u64>()
            * PAGE as u64
    }

    /// Copies them out, so that the process may go on.
    fn copy(&self, py: Python<'_>) -> PyResult<HeldPages> {
        let held = py.detach(|| pages::copy(self.memory, &self.runs));
        Ok(HeldPages(held.map_err(os_error)?))
    }

    /// Writes them to the file at `path`, each at its own place; the runs that it holds now, and the
    /// bytes of those that are no zeroes.
    fn write<'py>(&self, py: Python<'py>, path: PathBuf) -> PyResult<(Bound<'py, PyBytes>, u64)> {
        let done = py.detach(|| pages::write_through(self.memory, &self.runs, &open(&path)?));
        Ok(told(py, &done.map_err(os_error)?))
    }
}

/// Pages that were copied out.
#[pyclass(frozen, module = "agentenv._core")]
pub struct HeldPages(pages::Held);

#[pymethods]
impl HeldPages {
    /// As `Pages.write`.
    fn write<'py>(&self, py: Python<'py>, path: PathBuf) -> PyResult<(Bound<'py, PyBytes>, u64)> {
        let done = py.detach(|| self.0.write(&open(&path)?));
        Ok(told(py, &done.map_err(os_error)?))
    }
}

fn open(path: &PathBuf) -> std::io::Result<File> {
    File::options().write(true).open(path)
}

fn told<'py>(py: Python<'py>, written: &pages::Written) -> (Bound<'py, PyBytes>, u64) {
    let packed = packed(written.runs.iter().copied());
    (
        PyBytes::new(py, &packed),
        u64::from(written.data_pages) * PAGE as u64,
    )
}

pub fn packed(runs: impl Iterator<Item = (u32, u32, bool)>) -> Vec<u8> {
    runs.flat_map(|(first, count, zero)| [first, count, u32::from(zero)])
        .flat_map(u32::to_le_bytes)
        .collect()
}

/// Raises ValueError unless they are runs in order.
fn unpacked(bytes: &[u8]) -> PyResult<Vec<(u32, u32, bool)>> {
    if bytes.len() % RUN != 0 {
        return Err(PyValueError::new_err("runs are cut off"));
    }
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("4 bytes"));
    let runs: Vec<_> = bytes
        .chunks_exact(RUN)
        .map(|run| (number(&run[..4]), number(&run[4..8]), run[8] != 0))
        .collect();
    let mut behind = 0u32;
    for (first, count, _) in &runs {
        let end = first.checked_add(*count);
        if *first < behind || end.is_none() {
            return Err(PyValueError::new_err("runs are out of order"));
        }
        behind = first + count;
    }
    Ok(runs)
}

/// The runs of a layer, as `Pages.write` gives those of a file.
#[pyfunction]
pub fn layer_runs<'py>(py: Python<'py>, layer: &Layer) -> Bound<'py, PyBytes> {
    let extents = layer.table().extents().iter();
    PyBytes::new(py, &packed(extents.map(|e| (e.first, e.count, e.zero))))
}

/// Runs as (first, count, offset in a flat file, None for zeroes), for `write_layer`.
#[pyfunction]
pub fn run_spans(runs: &[u8]) -> PyResult<Vec<(u32, u32, Option<u64>)>> {
    let span = |(first, count, zero): (u32, u32, bool)| {
        (
            first,
            count,
            (!zero).then_some(u64::from(first) * PAGE as u64),
        )
    };
    Ok(unpacked(runs)?.into_iter().map(span).collect())
}

/// Layers' runs laid over one another, lowest first; zeroes stay, since there may be more below.
#[pyfunction]
pub fn merge_runs(py: Python<'_>, layers: Vec<Vec<u8>>) -> PyResult<Bound<'_, PyBytes>> {
    let mut joined: Vec<(u32, u32, bool)> = Vec::new();
    for top in merged(&layers)? {
        match joined.last_mut() {
            Some((first, count, zero)) if *first + *count == top.first && *zero == top.zero => {
                *count += top.count
            }
            _ => joined.push((top.first, top.count, top.zero)),
        }
    }
    Ok(PyBytes::new(py, &packed(joined.into_iter())))
}

/// The map that `agentenv-map` lays a guest's memory by: `layers` are (file, runs), lowest first;
/// each file is flat.
#[pyfunction]
pub fn memory_map(py: Python<'_>, layers: Vec<(PathBuf, Vec<u8>)>) -> PyResult<Bound<'_, PyBytes>> {
    let (files, runs): (Vec<PathBuf>, Vec<Vec<u8>>) = layers.into_iter().unzip();
    let tops = merged(&runs)?;
    let mut out = Vec::from(&b"agentenv-map 1\n"[..]);
    for file in &files {
        writeln!(out, "f {}", file.display()).map_err(os_error)?;
    }
    for top in tops.iter().filter(|top| !top.zero) {
        let (at, bytes) = (
            u64::from(top.first) * PAGE as u64,
            u64::from(top.count) * PAGE as u64,
        );
        writeln!(out, "p {at} {bytes} {} {at}", top.layer).map_err(os_error)?;
    }
    Ok(PyBytes::new(py, &out))
}

fn merged(layers: &[Vec<u8>]) -> PyResult<Vec<Top>> {
    let runs: PyResult<Vec<_>> = layers.iter().map(|runs| unpacked(runs)).collect();
    stack::tops(&runs?).map_err(damaged)
}

fn os_error(error: std::io::Error) -> PyErr {
    match error.raw_os_error() {
        Some(number) => PyOSError::new_err((number, error.to_string())),
        None => PyOSError::new_err(error.to_string()),
    }
}
