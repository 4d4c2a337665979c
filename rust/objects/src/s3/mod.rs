//! Objects in an S3-compatible store, through `object_store`.

mod client;
mod fault;
mod multipart;
mod resolve;

use std::future::Future;
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::OnceLock;
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use object_store::aws::AmazonS3;
use object_store::path::Path as Name;
use object_store::{
    GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutPayload,
};

use crate::error::{Error, Fault};
use crate::key::{check_key, check_prefix, range_length};
use crate::location::Place;
use crate::scratch::Scratch;
use crate::{Entry, Objects};

#[cfg(test)]
pub(crate) use client::use_ring;

/// Above this an object is sent in parts.
const IN_ONE: u64 = 16 << 20;
/// A transfer slower than this is given up: silence alone would let a drop a minute pass.
const SLOWEST: u64 = 64 << 10;

pub(crate) struct S3 {
    store: AmazonS3,
    place: Place,
    name: String,
    prefix: String,
    silence: Duration,
    /// Whether this server was found not to know `If-None-Match`.
    without_conditions: AtomicBool,
    /// Deletes one by one: there once the server was found not to delete many.
    singly: OnceLock<AmazonS3>,
}

impl S3 {
    pub fn open(place: &Place) -> Result<Self, Error> {
        Ok(Self {
            store: client::build(place, true)?,
            place: place.clone(),
            name: place.name(),
            prefix: place.prefix.clone(),
            silence: place.silence,
            without_conditions: AtomicBool::new(false),
            singly: OnceLock::new(),
        })
    }

    fn object(&self, key: &str) -> Result<Name, Error> {
        check_key(key)?;
        Ok(self.name_of(key))
    }

    fn name_of(&self, key: &str) -> Name {
        Name::from_iter(
            self.prefix
                .split('/')
                .chain(key.split('/'))
                .filter(|part| !part.is_empty()),
        )
    }

    /// The key of an object that was listed; None for what is not ours.
    fn entry(&self, meta: ObjectMeta) -> Option<Entry> {
        let name = meta.location.as_ref().strip_prefix(&self.prefix)?;
        let key = if self.prefix.is_empty() {
            name
        } else {
            name.strip_prefix('/')?
        };
        check_key(key).ok()?;
        Some(Entry {
            key: key.to_owned(),
            size: meta.size,
            modified: meta.last_modified.into(),
        })
    }

    /// Wait for one request that moves `bytes`, with an end.
    async fn bounded<T>(
        &self,
        key: &str,
        bytes: u64,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Error> {
        let explained = async { request.await.map_err(|error| self.explain(key, &error)) };
        self.within(key, bytes, explained).await
    }

    async fn within<T>(
        &self,
        key: &str,
        bytes: u64,
        work: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let deadline = 4 * self.silence + Duration::from_secs(bytes / SLOWEST);
        let late = |_| Err(self.unavailable(key, format!("no end after {deadline:?}")));
        tokio::time::timeout(deadline, work)
            .await
            .unwrap_or_else(late)
    }

    /// Write the body of an answer to a file, whole.
    async fn save(&self, key: &str, answer: GetResult, path: &Path) -> Result<u64, Error> {
        let trouble = |error: std::io::Error| fault::of_file(&self.name, key, path, &error);
        let expected = answer.meta.size;
        let mut scratch = Scratch::beside(path).map_err(trouble)?;
        let (mut parts, mut came) = (answer.into_stream(), 0);
        while let Some(part) = parts
            .try_next()
            .await
            .map_err(|error| self.explain(key, &error))?
        {
            came += part.len() as u64;
            // Into the page cache: shorter than a hop to another thread.
            scratch.file.write_all(&part).map_err(trouble)?;
        }
        if came != expected {
            return Err(self.damaged(key, format!("{came} of {expected} bytes came")));
        }
        scratch.rename(path).map_err(trouble)?;
        Ok(came)
    }

    fn explain(&self, key: &str, error: &object_store::Error) -> Error {
        fault::explain(&self.name, key, error)
    }

    fn unavailable(&self, key: &str, cause: String) -> Error {
        Error::Unavailable(Fault::new(&self.name, key, cause))
    }

    fn damaged(&self, key: &str, cause: String) -> Error {
        Error::Damaged(Fault::new(&self.name, key, cause))
    }

    /// The body of an answer, if it is as long as was said.
    async fn body(&self, key: &str, answer: GetResult) -> Result<Bytes, Error> {
        let expected = answer.range.end - answer.range.start;
        let collect = async {
            let mut parts = answer.into_stream();
            let mut data = BytesMut::with_capacity(expected as usize);
            while let Some(part) = parts.try_next().await? {
                data.extend_from_slice(&part);
                if data.len() as u64 > expected {
                    break;
                }
            }
            Ok(data.freeze())
        };
        let data = self.bounded(key, expected, collect).await?;
        match data.len() as u64 == expected {
            true => Ok(data),
            false => Err(self.damaged(key, format!("{} of {expected} bytes came", data.len()))),
        }
    }

    async fn write(&self, key: &str, data: Bytes, mode: PutMode) -> object_store::Result<()> {
        self.store
            .put_opts(&self.name_of(key), PutPayload::from(data), mode.into())
            .await
            .map(|_| ())
    }

    /// For servers without conditions: look, then write.
    async fn put_if_absent(&self, key: &str, data: Bytes) -> Result<bool, Error> {
        if self.head(key).await?.is_some() {
            return Ok(false);
        }
        self.put(key, data).await.map(|()| true)
    }

    fn singly(&self) -> Result<&AmazonS3, Error> {
        match self.singly.get() {
            Some(store) => Ok(store),
            None => {
                let made = client::build(&self.place, false)?;
                Ok(self.singly.get_or_init(|| made))
            }
        }
    }

    async fn delete_with(&self, store: &AmazonS3, names: Vec<Name>) -> object_store::Result<()> {
        store
            .delete_stream(stream::iter(names).map(Ok).boxed())
            .map(|done| match done {
                Err(object_store::Error::NotFound { .. }) => Ok(()),
                done => done.map(|_| ()),
            })
            .try_for_each(|()| async { Ok(()) })
            .await
    }
}

#[async_trait]
impl Objects for S3 {
    async fn get(&self, key: &str, limit: u64) -> Result<Bytes, Error> {
        let name = self.object(key)?;
        let answer = self.bounded(key, 0, self.store.get(&name)).await?;
        let size = answer.meta.size;
        if size > limit {
            return Err(self.damaged(
                key,
                format!("it has {size} bytes, {limit} at most are expected"),
            ));
        }
        self.body(key, answer).await
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, Error> {
        let (name, length) = (self.object(key)?, range_length(key, &range)?);
        if length == 0 {
            return Ok(Bytes::new());
        }
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            ..Default::default()
        };
        let answer = self
            .bounded(key, 0, self.store.get_opts(&name, options))
            .await?;
        if answer.range != range {
            let end = answer.range.end;
            return Err(self.damaged(key, format!("it ends at byte {end}, {range:?} was wanted")));
        }
        self.body(key, answer).await
    }

    async fn get_to(&self, key: &str, path: &Path) -> Result<u64, Error> {
        let name = self.object(key)?;
        let answer = self.bounded(key, 0, self.store.get(&name)).await?;
        let size = answer.meta.size;
        self.within(key, size, self.save(key, answer, path)).await
    }

    async fn put(&self, key: &str, data: Bytes) -> Result<(), Error> {
        let (name, size) = (self.object(key)?, data.len() as u64);
        match size > IN_ONE {
            true => multipart::send(self, key, &name, multipart::Source::Memory(data)).await,
            false => {
                self.bounded(key, size, self.write(key, data, PutMode::Overwrite))
                    .await
            }
        }
    }

    async fn put_new(&self, key: &str, data: Bytes) -> Result<bool, Error> {
        check_key(key)?;
        if self.without_conditions.load(Ordering::Relaxed) {
            return self.put_if_absent(key, data).await;
        }
        let size = data.len() as u64;
        let write = async {
            match self.write(key, data.clone(), PutMode::Create).await {
                Err(error) if fault::unsupported(&error) => Ok(None),
                Err(object_store::Error::AlreadyExists { .. }) => Ok(Some(false)),
                done => done.map(|()| Some(true)),
            }
        };
        match self.bounded(key, size, write).await? {
            Some(true) => Ok(true),
            // "Conflict" is also said of a race that nobody has won yet.
            Some(false) => match self.head(key).await? {
                Some(_) => Ok(false),
                None => Err(self.unavailable(key, "somebody else writes it".into())),
            },
            None => {
                self.without_conditions.store(true, Ordering::Relaxed);
                self.put_if_absent(key, data).await
            }
        }
    }

    async fn put_file(&self, key: &str, path: &Path) -> Result<(), Error> {
        let name = self.object(key)?;
        let trouble = |error: std::io::Error| fault::of_file(&self.name, key, path, &error);
        let file = tokio::fs::File::open(path).await.map_err(trouble)?;
        let size = file.metadata().await.map_err(trouble)?.len();
        if size > IN_ONE {
            let file = file.into_std().await;
            return multipart::send(self, key, &name, multipart::Source::File(file.into(), size))
                .await;
        }
        let data = tokio::fs::read(path).await.map_err(trouble)?;
        self.bounded(key, size, self.write(key, data.into(), PutMode::Overwrite))
            .await
    }

    async fn head(&self, key: &str) -> Result<Option<Entry>, Error> {
        let name = self.object(key)?;
        match self.bounded(key, 0, self.store.head(&name)).await {
            Ok(meta) => Ok(Some(Entry {
                key: key.to_owned(),
                size: meta.size,
                modified: meta.last_modified.into(),
            })),
            Err(Error::NotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Entry>, Error> {
        check_prefix(prefix)?;
        let name = self.name_of(prefix);
        let mut found: Vec<Entry> = self
            .store
            .list((!name.as_ref().is_empty()).then_some(&name))
            .try_filter_map(|meta| async { Ok(self.entry(meta)) })
            .try_collect()
            .await
            .map_err(|error| self.explain(prefix, &error))?;
        found.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Ok(found)
    }

    async fn delete(&self, keys: &[String]) -> Result<(), Error> {
        let names: Vec<Name> = keys
            .iter()
            .map(|key| self.object(key))
            .collect::<Result<_, _>>()?;
        let told = |error| self.explain("", &error);
        if let Some(store) = self.singly.get() {
            return self.delete_with(store, names).await.map_err(told);
        }
        match self.delete_with(&self.store, names.clone()).await {
            Err(error) if fault::refuses_many(&error) => {
                let store = self.singly()?;
                self.delete_with(store, names).await.map_err(told)
            }
            done => done.map_err(told),
        }
    }

    async fn sweep_drafts(&self) -> Result<u64, Error> {
        Ok(0)
    }
}
