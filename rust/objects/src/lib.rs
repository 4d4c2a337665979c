//! The truth of the block store: whole immutable objects under keys, in a directory or in an
//! S3-compatible store.
//!
//! [`open`] makes an [`Objects`] of a URL. Every operation is whole or nothing, also when its
//! future is dropped, and ends in bounded time: retries here are few, the caller knows how long
//! its own work may wait ([`Error::retryable`]).

mod credentials;
mod directory;
mod error;
mod key;
mod location;
mod s3;
mod scratch;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use bytes::Bytes;

pub use error::{Error, Fault};
pub use key::{check_key, check_prefix};

use location::Location;

/// What is known of an object without reading it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub key: String,
    pub size: u64,
    pub modified: SystemTime,
}

/// A store of whole immutable objects. Keys are as [`check_key`] says.
#[async_trait]
pub trait Objects: Send + Sync {
    /// The object, which may have at most `limit` bytes: one that has more is `Damaged`.
    async fn get(&self, key: &str, limit: u64) -> Result<Bytes, Error>;

    /// Exactly the bytes of `range`; an object that ends before is `Damaged`.
    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, Error>;

    /// Whether objects are files here, so that `read_here` works.
    fn is_here(&self) -> bool {
        false
    }

    /// Fills `out` from byte `start` of an object on, by the calling thread, which this may block;
    /// whether that worked. `get_range` tells why it did not.
    fn read_here(&self, _key: &str, _start: u64, _out: &mut [u8]) -> bool {
        false
    }

    /// Lay the object at `path`, whole or not at all, and say its size. Not synced; a process
    /// that is killed leaves a hidden file beside it.
    async fn get_to(&self, key: &str, path: &Path) -> Result<u64, Error>;

    /// Lay `data` under `key` in the place of what is there; durable when it returns.
    async fn put(&self, key: &str, data: Bytes) -> Result<(), Error>;

    /// Lay `data` under `key` if nothing is there; whether this call did it. After a lost answer
    /// a repeated request may find its own object and say false.
    ///
    /// An S3-compatible store that refuses `If-None-Match` is asked first and written then: two
    /// writers at once may both be told true there.
    async fn put_new(&self, key: &str, data: Bytes) -> Result<bool, Error>;

    /// As `put`, with the content of the file at `path`.
    async fn put_file(&self, key: &str, path: &Path) -> Result<(), Error>;

    async fn head(&self, key: &str) -> Result<Option<Entry>, Error>;

    /// All objects whose key begins with `prefix` (empty, or a folder with its slash), by key.
    async fn list(&self, prefix: &str) -> Result<Vec<Entry>, Error>;

    /// Absent is success.
    async fn delete(&self, keys: &[String]) -> Result<(), Error>;

    /// Remove what writers that died left half made; how many. What a dead writer left in S3 is
    /// invisible and goes by the bucket's rule for incomplete multipart uploads.
    async fn sweep_drafts(&self) -> Result<u64, Error>;
}

/// The store at `url`: `/abs/path`, `file:///abs/path` or
/// `s3://BUCKET[/PREFIX][?endpoint=http://HOST:PORT&region=R&style=path|virtual&profile=NAME&timeout=SECONDS]`.
///
/// A directory is made if it is not there; an S3 store is not asked before it is used.
/// `timeout` (20 s) is how long a server may keep silent, and a request of up to 16 MiB may take
/// to be sent. Credentials come from the environment, the shared files or where these point to,
/// never from the URL; the environment is read once, here. A name with `style=virtual` needs an
/// endpoint that is a name: `localhost` and all names below it are this machine.
pub async fn open(url: &str) -> Result<Arc<dyn Objects>, Error> {
    Ok(match Location::parse(url)? {
        Location::Directory(root) => Arc::new(directory::Directory::open(root).await?),
        Location::S3(place) => Arc::new(s3::S3::open(&place)?),
    })
}
