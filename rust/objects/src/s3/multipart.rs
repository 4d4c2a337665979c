//! Large objects in parts, some at a time; what is not completed is aborted, also when the
//! sender's future is dropped.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, TryStreamExt};
use object_store::path::Path as Name;
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload};

use crate::error::{Error, Fault};

use super::{S3, SLOWEST};

const PART: u64 = 8 << 20;
const MOST_PARTS: u64 = 10_000;
const AT_ONCE: usize = 4;
const ABORT: Duration = Duration::from_secs(30);

pub(super) enum Source {
    Memory(Bytes),
    File(Arc<File>, u64),
}

impl Source {
    fn size(&self) -> u64 {
        match self {
            Self::Memory(data) => data.len() as u64,
            Self::File(_, size) => *size,
        }
    }

    async fn part(&self, start: u64, length: usize) -> std::io::Result<Bytes> {
        match self {
            Self::Memory(data) => Ok(data.slice(start as usize..start as usize + length)),
            Self::File(file, _) => {
                let file = file.clone();
                let read = move || {
                    let mut data = vec![0; length];
                    file.read_exact_at(&mut data, start).map(|()| data.into())
                };
                tokio::task::spawn_blocking(read)
                    .await
                    .map_err(std::io::Error::other)?
            }
        }
    }
}

pub(super) async fn send(store: &S3, key: &str, name: &Name, source: Source) -> Result<(), Error> {
    let begin = store.store.put_multipart(name);
    let mut upload = Upload(Some(store.bounded(key, 0, begin).await?));
    match send_parts(store, key, &mut upload, &source).await {
        Ok(()) => {}
        Err(error) => {
            upload.abort().await;
            return Err(error);
        }
    }
    let Some(open) = upload.0.as_mut() else {
        return Ok(());
    };
    // The server puts the parts together before it answers.
    store.bounded(key, source.size(), open.complete()).await?;
    upload.0 = None;
    Ok(())
}

async fn send_parts(
    store: &S3,
    key: &str,
    upload: &mut Upload,
    source: &Source,
) -> Result<(), Error> {
    let size = source.size();
    let part = part_size(size);
    let Some(open) = upload.0.as_mut() else {
        return Ok(());
    };
    let mut sending = FuturesUnordered::new();
    // Parts are numbered in the order in which they are asked for, so they are read in order.
    for start in (0..size).step_by(part as usize) {
        if sending.len() >= AT_ONCE {
            sending.try_next().await?;
        }
        let length = part.min(size - start);
        let data = source.part(start, length as usize).await.map_err(|error| {
            let cause = format!("what is sent could not be read: {error}");
            Error::Io(Fault::new(&store.name, key, cause))
        })?;
        let sent = open.put_part(PutPayload::from(data));
        sending.push(store.bounded(key, length * AT_ONCE as u64, sent));
    }
    while sending.try_next().await?.is_some() {}
    Ok(())
}

/// All parts but the last have one size, at most 10,000 are allowed.
fn part_size(size: u64) -> u64 {
    let least = size.div_ceil(MOST_PARTS);
    PART.max(least.next_multiple_of(SLOWEST))
}

/// An upload that is open until it is completed.
struct Upload(Option<Box<dyn MultipartUpload>>);

impl Upload {
    async fn abort(&mut self) {
        if let Some(open) = self.0.as_mut() {
            let _ = tokio::time::timeout(ABORT, open.abort()).await;
            self.0 = None;
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let (Some(open), Ok(runtime)) = (self.0.take(), tokio::runtime::Handle::try_current()) {
            let mut open = Upload(Some(open));
            runtime.spawn(async move { open.abort().await });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_few_enough() {
        for size in [
            1,
            PART * 5,
            PART * MOST_PARTS,
            PART * MOST_PARTS + 1,
            5 << 40,
        ] {
            assert!(size.div_ceil(part_size(size)) <= MOST_PARTS, "{size}");
        }
        assert_eq!(part_size(40 << 20), PART);
    }
}
