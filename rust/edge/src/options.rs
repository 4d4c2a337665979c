//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use lexopt::prelude::*;

use crate::tls::Pair;

pub const USAGE: &str = "usage: agentenv-edge --listen ADDRESS:PORT [--listen ...] \
--api unix:PATH --control PATH [--tls-cert PATH --tls-key PATH] [--api-wait SECONDS] \
[--wake-wait SECONDS] [--drain SECONDS]";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    pub listen: Vec<SocketAddr>,
    pub api: PathBuf,
    pub control: PathBuf,
    /// With it every listener speaks TLS.
    pub tls: Option<Pair>,
    /// How long a request waits for an API server that does not accept.
    pub api_wait: Duration,
    /// How long a request waits for a sandbox that sleeps.
    pub wake_wait: Duration,
    /// How long SIGTERM waits for requests under way.
    pub drain: Duration,
}

impl Options {
    pub fn parse(mut parser: lexopt::Parser) -> Result<Self, lexopt::Error> {
        let (mut listen, mut api, mut control) = (Vec::new(), None, None);
        let (mut cert, mut key) = (None, None);
        let (mut api_wait, mut drain) = (Duration::from_secs(10), Duration::from_secs(30));
        let mut wake_wait = Duration::from_secs(60);
        while let Some(argument) = parser.next()? {
            match argument {
                Long("listen") => listen.push(parser.value()?.parse()?),
                Long("api") => api = Some(parser.value()?.parse_with(unix_path)?),
                Long("control") => control = Some(PathBuf::from(parser.value()?)),
                Long("tls-cert") => cert = Some(PathBuf::from(parser.value()?)),
                Long("tls-key") => key = Some(PathBuf::from(parser.value()?)),
                Long("api-wait") => api_wait = parser.value()?.parse_with(seconds)?,
                Long("wake-wait") => wake_wait = parser.value()?.parse_with(seconds)?,
                Long("drain") => drain = parser.value()?.parse_with(seconds)?,
                other => return Err(other.unexpected()),
            }
        }
        if listen.is_empty() {
            return Err("--listen is missing".into());
        }
        Ok(Self {
            listen,
            api: api.ok_or("--api is missing")?,
            control: control.ok_or("--control is missing")?,
            tls: pair(cert, key)?,
            api_wait,
            wake_wait,
            drain,
        })
    }
}

fn pair(cert: Option<PathBuf>, key: Option<PathBuf>) -> Result<Option<Pair>, &'static str> {
    match (cert, key) {
        (Some(cert), Some(key)) => Ok(Some(Pair { cert, key })),
        (None, None) => Ok(None),
        _ => Err("--tls-cert and --tls-key are given both or neither"),
    }
}

fn unix_path(text: &str) -> Result<PathBuf, &'static str> {
    let path = text.strip_prefix("unix:").filter(|path| !path.is_empty());
    path.map(PathBuf::from)
        .ok_or("must have the form unix:PATH")
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
        Options::parse(lexopt::Parser::from_args(words)).map_err(|e| e.to_string())
    }

    #[test]
    fn all_of_it() {
        let options = parse(
            "--listen 127.0.0.1:0 --listen [::1]:80 --api unix:/a --control /b --api-wait 0.5 --drain 2 --wake-wait 3 \
             --tls-cert /c --tls-key /k",
        )
        .expect("a legal command line");
        assert_eq!(options.listen.len(), 2);
        assert_eq!(options.api, PathBuf::from("/a"));
        assert_eq!(options.api_wait, Duration::from_millis(500));
        assert_eq!(options.wake_wait, Duration::from_secs(3));
        assert_eq!(options.drain, Duration::from_secs(2));
        let (cert, key) = (PathBuf::from("/c"), PathBuf::from("/k"));
        assert_eq!(options.tls, Some(Pair { cert, key }));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        for (line, word) in [
            ("--api unix:/a --control /b", "--listen"),
            ("--listen 127.0.0.1:0 --control /b", "--api"),
            ("--listen 127.0.0.1:0 --api /a --control /b", "unix:PATH"),
            ("--listen nowhere --api unix:/a --control /b", "nowhere"),
            (
                "--listen 127.0.0.1:0 --api unix:/a --control /b --tls-cert /c",
                "--tls-key",
            ),
            (
                "--listen 127.0.0.1:0 --api unix:/a --control /b --drain -1",
                "below 0",
            ),
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}
