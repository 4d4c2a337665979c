//! The command line.

use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

use lexopt::prelude::*;

pub const USAGE: &str = "usage: agentenv-blockd --store URL --cache DIR --cache-size BYTES \
--cache-free BYTES --state DIR --control PATH --fuse-fd N [--adopt] [--patience SECONDS] [--threads N] \
[--peer URL ...] [--peer-listen ADDRESS:PORT] [--peer-token-file PATH]";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    pub store: String,
    pub cache: PathBuf,
    /// Bytes of chunks kept at most, and bytes left free on their file system.
    pub cache_size: u64,
    pub cache_free: u64,
    /// Where a restarted server finds what was open.
    pub state: PathBuf,
    pub control: PathBuf,
    /// The mounted /dev/fuse.
    pub fuse_fd: RawFd,
    /// How long a read of a disk waits for the store.
    pub patience: Duration,
    pub threads: usize,
    /// Another server answered at this mount before.
    pub adopt: bool,
    pub peers: Vec<String>,
    pub peer_listen: Option<std::net::SocketAddr>,
    pub peer_token_file: Option<PathBuf>,
}

impl Options {
    pub fn parse(mut parser: lexopt::Parser) -> Result<Self, lexopt::Error> {
        let (mut store, mut cache, mut state, mut control, mut fuse_fd) = Default::default();
        let (mut cache_size, mut cache_free) = (None, 0);
        let (mut patience, mut threads) = (Duration::from_secs(30), 4);
        let mut adopt = false;
        let (mut peers, mut peer_listen, mut peer_token_file) = Default::default();
        while let Some(argument) = parser.next()? {
            match argument {
                Long("store") => store = Some(parser.value()?.string()?),
                Long("cache") => cache = Some(PathBuf::from(parser.value()?)),
                Long("cache-size") => cache_size = Some(parser.value()?.parse()?),
                Long("cache-free") => cache_free = parser.value()?.parse()?,
                Long("state") => state = Some(PathBuf::from(parser.value()?)),
                Long("control") => control = Some(PathBuf::from(parser.value()?)),
                Long("fuse-fd") => fuse_fd = Some(parser.value()?.parse_with(descriptor)?),
                Long("patience") => patience = parser.value()?.parse_with(seconds)?,
                Long("threads") => threads = parser.value()?.parse()?,
                Long("adopt") => adopt = true,
                Long("peer") => Vec::push(&mut peers, parser.value()?.string()?),
                Long("peer-listen") => peer_listen = Some(parser.value()?.parse()?),
                Long("peer-token-file") => peer_token_file = Some(parser.value()?.into()),
                other => return Err(other.unexpected()),
            }
        }
        Ok(Self {
            store: store.ok_or("--store is missing")?,
            cache: cache.ok_or("--cache is missing")?,
            cache_size: cache_size.ok_or("--cache-size is missing")?,
            cache_free,
            state: state.ok_or("--state is missing")?,
            control: control.ok_or("--control is missing")?,
            fuse_fd: fuse_fd.ok_or("--fuse-fd is missing")?,
            patience,
            threads: threads.clamp(1, 64),
            adopt,
            peers,
            peer_listen,
            peer_token_file,
        })
    }
}

fn descriptor(text: &str) -> Result<RawFd, &'static str> {
    let number = text.parse().ok().filter(|number| *number > 2);
    number.ok_or("must be the number of a descriptor above 2")
}

fn seconds(text: &str) -> Result<Duration, &'static str> {
    let seconds: f64 = text.parse().map_err(|_| "must be a number of seconds")?;
    Duration::try_from_secs_f64(seconds).map_err(|_| "must be a number of seconds, not below 0")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        let words = line.split_whitespace().map(str::to_owned);
        Options::parse(lexopt::Parser::from_args(words)).map_err(|error| error.to_string())
    }

    const WHOLE: &str = "--store /s --cache /c --cache-size 10 --state /t --control /k --fuse-fd 3";

    #[test]
    fn what_is_needed_suffices() {
        let options = parse(WHOLE).expect("a legal command line");
        assert_eq!((options.cache_size, options.fuse_fd), (10, 3));
        assert_eq!(options.patience, Duration::from_secs(30));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        for name in [
            "--store",
            "--cache",
            "--cache-size",
            "--state",
            "--control",
            "--fuse-fd",
        ] {
            let words: Vec<&str> = WHOLE.split(' ').collect();
            let rest = words.chunks(2).filter(|pair| pair[0] != name).flatten();
            let line = rest.copied().collect::<Vec<_>>().join(" ");
            assert!(parse(&line).expect_err(name).contains(name));
        }
        for wrong in [
            "--fuse-fd 1",
            "--patience -1",
            "--cache-size x",
            "--peer-listen here",
        ] {
            assert!(parse(&format!("{WHOLE} {wrong}")).is_err(), "{wrong}");
        }
    }
}
