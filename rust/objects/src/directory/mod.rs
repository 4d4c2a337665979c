//! Objects as files: the key `pack/abcd` lies at `ROOT/pack/ab/abcd`, drafts in `ROOT/drafts`.
//!
//! All work is blocking and runs to its end on a thread of its own, so a dropped future leaves a
//! whole object or none.

mod draft;
mod fault;
mod walk;

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use crate::error::{Error, Fault};
use crate::key::{check_key, check_prefix};
use crate::scratch::Scratch;
use crate::{Entry, Objects};

use fault::explain;

#[derive(Clone)]
pub(crate) struct Directory {
    root: Arc<Path>,
}

impl Directory {
    pub async fn open(root: PathBuf) -> Result<Self, Error> {
        let this = Self { root: root.into() };
        this.run("", draft::make_folders).await?;
        Ok(this)
    }

    /// Run blocking work; what it says is told as trouble with `key`.
    async fn run<T: Send + 'static>(
        &self,
        key: &str,
        work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let root = self.root.clone();
        let result = tokio::task::spawn_blocking(move || work(&root)).await;
        let result = result.unwrap_or_else(|error| Err(io::Error::other(error)));
        result.map_err(|error| explain(&self.root, key, &error))
    }

    fn damaged(&self, key: &str, cause: String) -> Error {
        Error::Damaged(Fault::new(&self.root.to_string_lossy(), key, cause))
    }
}

#[async_trait]
impl Objects for Directory {
    async fn get(&self, key: &str, limit: u64) -> Result<Bytes, Error> {
        let path = self.path(key)?;
        let (size, data) = self.run(key, move |_| read(&path, limit)).await?;
        match data {
            Some(data) => Ok(data),
            None => Err(self.damaged(
                key,
                format!("it has {size} bytes, {limit} at most are expected"),
            )),
        }
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, Error> {
        let length = crate::key::range_length(key, &range)?;
        let path = self.path(key)?;
        let wanted = range.clone();
        let data = self
            .run(key, move |_| read_range(&path, wanted.start, length))
            .await?;
        data.ok_or_else(|| {
            self.damaged(
                key,
                format!("it ends before byte {} of {range:?}", range.end),
            )
        })
    }

    fn is_here(&self) -> bool {
        true
    }

    fn read_here(&self, key: &str, start: u64, out: &mut [u8]) -> bool {
        let file = self.path(key).map(File::open);
        file.is_ok_and(|file| file.is_ok_and(|file| file.read_exact_at(out, start).is_ok()))
    }

    async fn get_to(&self, key: &str, path: &Path) -> Result<u64, Error> {
        let (source, target) = (self.path(key)?, path.to_owned());
        self.run(key, move |_| {
            let source = File::open(source)?;
            let scratch = Scratch::beside(&target)?;
            let size = draft::copy(&source, &scratch.file)?;
            scratch.rename(&target)?;
            Ok(size)
        })
        .await
    }

    async fn put(&self, key: &str, data: Bytes) -> Result<(), Error> {
        let target = self.path(key)?;
        self.run(key, move |root| {
            let mut draft = draft::create(root)?;
            draft.file.write_all(&data)?;
            draft::publish(draft, &target)
        })
        .await
    }

    async fn put_new(&self, key: &str, data: Bytes) -> Result<bool, Error> {
        let target = self.path(key)?;
        self.run(key, move |root| {
            if target.exists() {
                return Ok(false);
            }
            let mut draft = draft::create(root)?;
            draft.file.write_all(&data)?;
            draft::publish_new(draft, &target)
        })
        .await
    }

    async fn put_file(&self, key: &str, path: &Path) -> Result<(), Error> {
        let (source, target) = (path.to_owned(), self.path(key)?);
        let opened = self.run(key, move |_| Ok(File::open(source))).await?;
        let opened = opened.map_err(|error| fault::of_source(&self.root, key, path, &error))?;
        self.run(key, move |root| {
            let draft = draft::create(root)?;
            draft::copy(&opened, &draft.file)?;
            draft::publish(draft, &target)
        })
        .await
    }

    async fn head(&self, key: &str) -> Result<Option<Entry>, Error> {
        let (path, name) = (self.path(key)?, key.to_owned());
        let found = self.run(key, move |_| walk::entry(&path, name)).await;
        match found {
            Err(Error::NotFound(_)) => Ok(None),
            found => found.map(Some),
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Entry>, Error> {
        check_prefix(prefix)?;
        let wanted = prefix.to_owned();
        self.run(prefix, move |root| walk::list(root, &wanted))
            .await
    }

    async fn delete(&self, keys: &[String]) -> Result<(), Error> {
        for key in keys {
            let path = self.path(key)?;
            match self.run(key, move |_| std::fs::remove_file(path)).await {
                Err(Error::NotFound(_)) => {}
                done => done?,
            }
        }
        Ok(())
    }

    async fn sweep_drafts(&self) -> Result<u64, Error> {
        self.run("", draft::sweep).await
    }
}

impl Directory {
    fn path(&self, key: &str) -> Result<PathBuf, Error> {
        check_key(key)?;
        Ok(walk::place(&self.root, key))
    }
}

/// The size, and the bytes unless there are more than `limit`.
fn read(path: &Path, limit: u64) -> io::Result<(u64, Option<Bytes>)> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    if size > limit {
        return Ok((size, None));
    }
    let mut data = Vec::with_capacity(size as usize);
    file.take(limit).read_to_end(&mut data)?;
    Ok((size, Some(data.into())))
}

/// None if the file ends before.
fn read_range(path: &Path, start: u64, length: usize) -> io::Result<Option<Bytes>> {
    let file = File::open(path)?;
    if file.metadata()?.len() < start + length as u64 {
        return Ok(None);
    }
    let mut data = vec![0; length];
    match file.read_exact_at(&mut data, start) {
        Ok(()) => Ok(Some(data.into())),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}
