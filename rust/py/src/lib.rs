//! `agentenv._core`: thin bindings. They convert and release the interpreter lock; logic lives elsewhere.

use pyo3::prelude::*;

#[pymodule]
fn _core(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
