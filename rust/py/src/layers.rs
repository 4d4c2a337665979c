//! `agentenv._core`: block layers, written, read back, moved between packs.

use std::fs::File;
use std::io::{self, BufWriter};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use agentenv_blocks::chunk::{self, Entry};
use agentenv_blocks::cut::Cut;
use agentenv_blocks::layer::{Layer as Table, Place};
use agentenv_blocks::write::{self, Known, Span};
use agentenv_blocks::{pack, stack, Id, BLOCK};
use agentenv_objects::{Error, Objects as Store};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::objects::{runtime, Objects, ObjectsError};

/// Stored bytes fetched with one request where a whole layer is read.
const FETCH: u64 = 4 << 20;

/// Id, stored bytes, blocks, codec, pack, offset.
type Chunk<'py> = (Bound<'py, PyBytes>, u32, u16, u16, String, u64);
type GivenChunk = (Vec<u8>, u32, u16, u16, String, u64);

/// A layer's table.
#[pyclass(frozen, module = "agentenv._core")]
pub struct Layer(Table);

impl Layer {
    pub fn table(&self) -> &Table {
        &self.0
    }
}

#[pymethods]
impl Layer {
    #[staticmethod]
    fn decode(data: &[u8]) -> PyResult<Self> {
        Table::decode(data).map(Self).map_err(damaged)
    }

    fn encode<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.encode())
    }

    #[getter]
    fn id(&self) -> String {
        self.0.id().to_string()
    }

    #[getter]
    fn blocks(&self) -> u32 {
        self.0.blocks()
    }

    #[getter]
    fn data_bytes(&self) -> u64 {
        u64::from(self.0.data_blocks()) * BLOCK as u64
    }

    #[getter]
    fn packs(&self) -> Vec<String> {
        self.0.packs().iter().map(Id::to_string).collect()
    }

    fn chunks<'py>(&self, py: Python<'py>) -> Vec<Chunk<'py>> {
        (0..self.0.chunk_count())
            .map(|number| shown(py, self.0.entry(number), self.0.place(number)))
            .collect()
    }

    /// The same layer, its chunks where `places` says (by id); others stay.
    fn moved(&self, places: Vec<GivenChunk>) -> PyResult<Self> {
        let mut by_id = std::collections::HashMap::new();
        for given in places {
            let (entry, place) = taken(given)?;
            by_id.insert(entry.id, (entry, place));
        }
        let table = &self.0;
        let chunks: Vec<(Entry, Place)> = (0..table.chunk_count())
            .map(|number| {
                let held = (*table.entry(number), table.place(number));
                by_id.get(&held.0.id).copied().unwrap_or(held)
            })
            .collect();
        let extents = table
            .extents()
            .iter()
            .map(|e| (e.first, e.count, e.zero))
            .collect();
        let moved = Table::new(table.blocks(), extents, &chunks).map_err(damaged)?;
        if moved.id() != table.id() {
            return Err(PyValueError::new_err("other chunks make another layer"));
        }
        Ok(Self(moved))
    }
}

/// What `write_layer` made.
#[pyclass(frozen, module = "agentenv._core")]
pub struct WrittenLayer {
    #[pyo3(get)]
    layer: Py<Layer>,
    /// Id and bytes of the pack; None if every chunk was known.
    #[pyo3(get)]
    pack: Option<(String, u64)>,
    /// Plain bytes of the chunks in the pack.
    #[pyo3(get)]
    fresh_bytes: u64,
}

/// Writes a layer of `blocks` blocks from `spans` (first block, count, byte offset in `source` or None
/// for zeroes) and
/// its new chunks to a pack at `pack`. `window` is the fixed length of chunks in blocks, 0 cuts by
/// content. `known` is called with ids of chunks and answers with their places or None.
#[pyfunction]
pub fn write_layer(
    py: Python<'_>,
    source: PathBuf,
    blocks: u32,
    spans: Vec<(u32, u32, Option<u64>)>,
    window: u16,
    known: Py<PyAny>,
    pack: PathBuf,
) -> PyResult<WrittenLayer> {
    let cut = if window == 0 {
        Cut::Content
    } else {
        Cut::Fixed(window)
    };
    let spans: Vec<Span> = spans
        .into_iter()
        .map(|(first, count, offset)| Span {
            first,
            count,
            offset,
        })
        .collect();
    let written = py.detach(|| {
        let ask = |ids: &[Id]| {
            Python::attach(|py| asked(py, &known, ids))
                .map_err(|error| io::Error::other(Raised(error)))
        };
        let out = BufWriter::with_capacity(1 << 20, File::create(&pack)?);
        write::write(&File::open(&source)?, blocks, &spans, cut, ask, out)
    });
    let written = written.map_err(raise)?;
    Ok(WrittenLayer {
        layer: Py::new(py, Layer(written.layer))?,
        pack: written.pack.map(|(id, size)| (id.to_string(), size)),
        fresh_bytes: written.fresh,
    })
}

fn asked(py: Python<'_>, known: &Py<PyAny>, ids: &[Id]) -> PyResult<Vec<Known>> {
    let ids: Vec<_> = ids.iter().map(|id| PyBytes::new(py, &id.0)).collect();
    let found: Vec<Option<GivenChunk>> = known.call1(py, (ids,))?.extract(py)?;
    found
        .into_iter()
        .map(|one| one.map(taken).transpose())
        .collect()
}

/// Carries a Python exception through `io::Error`.
#[derive(Debug)]
struct Raised(PyErr);

impl std::fmt::Display for Raised {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(out)
    }
}

impl std::error::Error for Raised {}

fn raise(error: io::Error) -> PyErr {
    let raised = error.get_ref().is_some_and(|inner| inner.is::<Raised>());
    if !raised {
        return match error.raw_os_error() {
            Some(number) => PyOSError::new_err((number, error.to_string())),
            None => PyValueError::new_err(error.to_string()),
        };
    }
    match error.into_inner().map(|inner| inner.downcast::<Raised>()) {
        Some(Ok(raised)) => raised.0,
        _ => PyValueError::new_err("an exception got lost"),
    }
}

/// Writes the blocks of a layer to the file at `path`, from block `at` on; holes stay holes.
#[pyfunction]
pub fn unpack_layer(
    py: Python<'_>,
    objects: &Objects,
    layer: &Layer,
    path: PathBuf,
    at: u32,
) -> PyResult<()> {
    py.detach(|| {
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        let end = u64::from(at + layer.0.blocks()) * BLOCK as u64;
        file.set_len(file.metadata()?.len().max(end))?;
        let mut next = 0;
        while next < layer.0.chunk_count() {
            let (stop, range) = stretch(&layer.0, next);
            let bytes = fetch(objects, &layer.0.place(next).pack, range.clone())?;
            for number in next..stop {
                let from = (layer.0.place(number).offset - range.start) as usize;
                let entry = layer.0.entry(number);
                let plain = decoded(entry, &bytes[from..from + entry.stored as usize])?;
                put(&layer.0, number, &plain, &file, at)?;
            }
            next = stop;
        }
        Ok(())
    })
}

/// Chunks from `first` on that lie one behind another in their pack: the one behind the last, and
/// their range.
fn stretch(layer: &Table, first: u32) -> (u32, std::ops::Range<u64>) {
    let begin = layer.place(first);
    let mut end = begin.offset + u64::from(layer.entry(first).stored);
    let mut next = first + 1;
    while next < layer.chunk_count() && end - begin.offset < FETCH {
        let place = layer.place(next);
        if place.pack != begin.pack || place.offset != end {
            break;
        }
        end += u64::from(layer.entry(next).stored);
        next += 1;
    }
    (next, begin.offset..end)
}

fn put(layer: &Table, number: u32, plain: &[u8], file: &File, at: u32) -> PyResult<()> {
    let mut rest = plain;
    for (first, count) in layer.runs(layer.begin(number), layer.entry(number).blocks.into()) {
        let (part, more) = rest.split_at(count as usize * BLOCK);
        file.write_all_at(part, u64::from(at + first) * BLOCK as u64)?;
        rest = more;
    }
    Ok(())
}

fn decoded(entry: &Entry, stored: &[u8]) -> PyResult<Vec<u8>> {
    let mut plain = vec![0; entry.bytes()];
    chunk::decode(entry, stored, &mut plain).map_err(damaged)?;
    Ok(plain)
}

/// The chunks of a pack in the store.
#[pyfunction]
pub fn pack_chunks<'py>(
    py: Python<'py>,
    objects: &Objects,
    id: &str,
    size: u64,
) -> PyResult<Vec<Chunk<'py>>> {
    let pack = id.parse::<Id>().map_err(damaged)?;
    let found = py.detach(|| {
        let from = size.checked_sub(pack::FOOTER as u64);
        let from = from.ok_or_else(|| PyValueError::new_err("a pack is too short"))?;
        let footer = fetch(objects, &pack, from..size)?;
        let (at, length) = pack::directory_range(size, &footer).map_err(damaged)?;
        let directory = fetch(objects, &pack, at..at + length)?;
        pack::directory(&footer, &directory).map_err(damaged)
    })?;
    let chunks = found.into_iter();
    Ok(chunks
        .map(|(entry, offset)| shown(py, &entry, Place { pack, offset }))
        .collect())
}

/// Copies chunks (verified) from their packs into a new one at `path`; its id, its bytes, and the
/// chunks where they are now.
#[pyfunction]
pub fn repack<'py>(
    py: Python<'py>,
    objects: &Objects,
    chunks: Vec<GivenChunk>,
    path: PathBuf,
) -> PyResult<(String, u64, Vec<Chunk<'py>>)> {
    let chunks: Vec<(Entry, Place)> = chunks.into_iter().map(taken).collect::<PyResult<_>>()?;
    let (pack, size, moved) = py.detach(|| -> PyResult<_> {
        let mut out = pack::Writer::new(BufWriter::new(File::create(&path)?))?;
        let mut moved = Vec::new();
        for (entry, place) in chunks {
            let range = place.offset..place.offset + u64::from(entry.stored);
            let stored = fetch(objects, &place.pack, range)?;
            decoded(&entry, &stored)?;
            moved.push((entry, out.add(&entry, &stored)?));
        }
        let (id, size) = out.finish()?;
        Ok((id, size, moved))
    })?;
    let place = |offset| Place { pack, offset };
    let moved = moved
        .iter()
        .map(|(entry, at)| shown(py, entry, place(*at)))
        .collect();
    Ok((pack.to_string(), size, moved))
}

/// The chunks of those given whose bytes in the store are not theirs, with the reason.
#[pyfunction]
pub fn verify_chunks(
    py: Python<'_>,
    objects: &Objects,
    chunks: Vec<GivenChunk>,
) -> PyResult<Vec<(String, String)>> {
    let chunks: Vec<(Entry, Place)> = chunks.into_iter().map(taken).collect::<PyResult<_>>()?;
    py.detach(|| {
        let mut faults = Vec::new();
        for (entry, place) in chunks {
            let range = place.offset..place.offset + u64::from(entry.stored);
            let checked = fetch(objects, &place.pack, range).and_then(|b| decoded(&entry, &b));
            if let Err(error) = checked {
                faults.push((entry.id.to_string(), error.to_string()));
            }
        }
        Ok(faults)
    })
}

/// The name of the stack of these layers (id, first block), lowest first.
#[pyfunction]
pub fn stack_id(blocks: u32, layers: Vec<(String, u32)>) -> PyResult<String> {
    let layers: Result<Vec<(Id, u32)>, _> = layers
        .iter()
        .map(|(id, at)| Ok((id.parse()?, *at)))
        .collect();
    Ok(stack::id(blocks, &layers.map_err(damaged)?).to_string())
}

fn fetch(objects: &Objects, pack: &Id, range: std::ops::Range<u64>) -> PyResult<bytes::Bytes> {
    let store: &dyn Store = objects.store();
    let key = format!("pack/{pack}");
    let got = runtime()?.block_on(store.get_range(&key, range));
    got.map_err(|error: Error| ObjectsError::new_err((error.code(), error.to_string())))
}

fn shown<'py>(py: Python<'py>, entry: &Entry, place: Place) -> Chunk<'py> {
    let id = PyBytes::new(py, &entry.id.0);
    let pack = place.pack.to_string();
    (
        id,
        entry.stored,
        entry.blocks,
        entry.codec as u16,
        pack,
        place.offset,
    )
}

fn taken((id, stored, blocks, codec, pack, offset): GivenChunk) -> PyResult<(Entry, Place)> {
    let id =
        <[u8; 32]>::try_from(id).map_err(|_| PyValueError::new_err("an id has not 32 bytes"))?;
    let entry = Entry::new(Id(id), stored, blocks, codec).map_err(damaged)?;
    let pack = pack.parse().map_err(damaged)?;
    Ok((entry, Place { pack, offset }))
}

pub fn damaged(fault: agentenv_blocks::Damaged) -> PyErr {
    PyValueError::new_err(fault.to_string())
}
