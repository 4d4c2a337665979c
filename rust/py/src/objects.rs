//! `agentenv._core.Objects`: the object store with blocking methods.

use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::UNIX_EPOCH;

use agentenv_objects::{open, Entry, Error, Objects as Store};
use bytes::Bytes;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::runtime::{Builder, Runtime};

create_exception!(agentenv._core, ObjectsError, PyException, "(code, message)");

const WORKERS: usize = 2;

#[pyclass(frozen, module = "agentenv._core")]
pub struct Objects(Arc<dyn Store>);

impl Objects {
    pub(crate) fn store(&self) -> &dyn Store {
        &*self.0
    }
}

/// Key, size, seconds since the epoch.
type Listed = (String, u64, f64);

#[pymethods]
impl Objects {
    #[new]
    fn new(py: Python<'_>, url: &str) -> PyResult<Self> {
        wait(py, open(url)).map(Self)
    }

    fn get<'py>(&self, py: Python<'py>, key: &str, limit: u64) -> PyResult<Bound<'py, PyBytes>> {
        wait(py, self.0.get(key, limit)).map(|data| PyBytes::new(py, &data))
    }

    fn get_range<'py>(
        &self,
        py: Python<'py>,
        key: &str,
        start: u64,
        end: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        wait(py, self.0.get_range(key, start..end)).map(|data| PyBytes::new(py, &data))
    }

    fn get_to(&self, py: Python<'_>, key: &str, path: PathBuf) -> PyResult<u64> {
        wait(py, self.0.get_to(key, &path))
    }

    fn put(&self, py: Python<'_>, key: &str, data: &[u8]) -> PyResult<()> {
        wait(py, self.0.put(key, Bytes::copy_from_slice(data)))
    }

    fn put_new(&self, py: Python<'_>, key: &str, data: &[u8]) -> PyResult<bool> {
        wait(py, self.0.put_new(key, Bytes::copy_from_slice(data)))
    }

    fn put_file(&self, py: Python<'_>, key: &str, path: PathBuf) -> PyResult<()> {
        wait(py, self.0.put_file(key, &path))
    }

    fn head(&self, py: Python<'_>, key: &str) -> PyResult<Option<(u64, f64)>> {
        let found = wait(py, self.0.head(key))?;
        Ok(found
            .map(listed)
            .map(|(_, size, modified)| (size, modified)))
    }

    fn list(&self, py: Python<'_>, prefix: &str) -> PyResult<Vec<Listed>> {
        let found = wait(py, self.0.list(prefix))?;
        Ok(found.into_iter().map(listed).collect())
    }

    fn delete(&self, py: Python<'_>, keys: Vec<String>) -> PyResult<()> {
        wait(py, self.0.delete(&keys))
    }

    fn sweep_drafts(&self, py: Python<'_>) -> PyResult<u64> {
        wait(py, self.0.sweep_drafts())
    }
}

fn listed(entry: Entry) -> Listed {
    let since = entry
        .modified
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    (entry.key, entry.size, since.as_secs_f64())
}

/// Run to the end without the interpreter's lock.
fn wait<T: Send>(
    py: Python<'_>,
    work: impl Future<Output = Result<T, Error>> + Send,
) -> PyResult<T> {
    let runtime = runtime()?;
    py.detach(|| runtime.block_on(work))
        .map_err(|error| ObjectsError::new_err((error.code(), error.to_string())))
}

/// One for all stores of the process, made when the first is opened.
pub(crate) fn runtime() -> PyResult<&'static Runtime> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let made = Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_name("objects")
        .enable_all()
        .build()?;
    Ok(RUNTIME.get_or_init(|| made))
}
