//! Where a store is: the URL, taken apart and checked.

use std::path::PathBuf;
use std::time::Duration;

use reqwest::Url;

use crate::error::Error;

const SILENCE: Duration = Duration::from_secs(20);
const LONGEST_SILENCE: u64 = 600;

#[derive(Debug, PartialEq)]
pub(crate) enum Location {
    Directory(PathBuf),
    S3(Place),
}

#[derive(Debug, PartialEq, Clone)]
pub(crate) struct Place {
    pub bucket: String,
    /// Without slashes at its ends; may be empty.
    pub prefix: String,
    pub endpoint: Option<Url>,
    pub region: Option<String>,
    pub virtual_style: bool,
    pub profile: Option<String>,
    /// How long the server may keep silent.
    pub silence: Duration,
}

impl Location {
    pub fn parse(text: &str) -> Result<Self, Error> {
        if text.starts_with('/') {
            return Ok(Self::Directory(text.into()));
        }
        // Not shown when it cannot be read: it may hold a secret.
        let url = Url::parse(text).map_err(|why| {
            Error::invalid(
                "store URL",
                format!("{why}; expected /path, file:///path or s3://bucket"),
            )
        })?;
        match url.scheme() {
            "file" => directory(&url),
            "s3" => Ok(Self::S3(Place::parse(&url)?)),
            other => Err(Error::invalid(
                "store URL",
                format!("`{other}:` is not known; expected /path, file:///path or s3://bucket"),
            )),
        }
    }
}

fn directory(url: &Url) -> Result<Location, Error> {
    if url.query().is_some() || url.fragment().is_some() {
        return Err(Error::invalid("store URL", "a directory has no options"));
    }
    url.to_file_path()
        .map(Location::Directory)
        .map_err(|()| Error::invalid("store URL", "expected file:///absolute/path"))
}

impl Place {
    fn parse(url: &Url) -> Result<Self, Error> {
        let bucket = url.host_str().unwrap_or_default().to_owned();
        let refuse = |cause: String| Err(Error::invalid(&format!("s3://{bucket}"), cause));
        if !url.username().is_empty() || url.password().is_some() {
            return refuse("credentials do not belong in a URL; use the environment, ~/.aws/credentials or a profile".into());
        }
        if bucket.is_empty() || url.port().is_some() || url.fragment().is_some() {
            return refuse("expected s3://bucket/prefix?options".into());
        }
        let prefix = url.path().trim_matches('/').to_owned();
        if !prefix.is_empty() && prefix.split('/').any(|part| !plain(part)) {
            return refuse(format!(
                "`{prefix}` is no prefix: a-z, A-Z, 0-9, dot, underscore, dash between slashes"
            ));
        }
        let mut place = Self {
            bucket: bucket.clone(),
            prefix,
            endpoint: None,
            region: None,
            virtual_style: false,
            profile: None,
            silence: SILENCE,
        };
        // Without an endpoint it is the cloud's own, which wants the bucket in the host's name.
        let mut style = None;
        for (name, value) in url.query_pairs() {
            match &*name {
                "endpoint" => place.endpoint = Some(endpoint(&bucket, &value)?),
                "region" if plain(&value) => place.region = Some(value.into_owned()),
                "profile" if !value.is_empty() => place.profile = Some(value.into_owned()),
                "style" if value == "path" => style = Some(false),
                "style" if value == "virtual" => style = Some(true),
                "timeout" => place.silence = silence(&bucket, &value)?,
                "region" | "profile" | "style" => {
                    return refuse(format!("`{value}` is no {name}"));
                }
                _ => {
                    return refuse(format!(
                        "`{}` is no option; known: endpoint, region, style, profile, timeout (credentials never)",
                        name.escape_default()
                    ));
                }
            }
        }
        place.virtual_style = style.unwrap_or(place.endpoint.is_none());
        Ok(place)
    }

    /// How the store is called in messages.
    pub fn name(&self) -> String {
        let mut name = format!("s3://{}", self.bucket);
        if !self.prefix.is_empty() {
            name = format!("{name}/{}", self.prefix);
        }
        match &self.endpoint {
            Some(url) => format!("{name} at {}", url.as_str().trim_end_matches('/')),
            None => name,
        }
    }
}

fn plain(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !part.is_empty() && !part.starts_with('.') && part.chars().all(allowed)
}

fn endpoint(bucket: &str, text: &str) -> Result<Url, Error> {
    let good = Url::parse(text).ok().filter(|url| {
        matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.username().is_empty()
            && url.password().is_none()
            && url.query().is_none()
            && url.path() == "/"
    });
    good.ok_or_else(|| {
        Error::invalid(
            &format!("s3://{bucket}"),
            "endpoint is not of the form http(s)://HOST[:PORT]",
        )
    })
}

fn silence(bucket: &str, text: &str) -> Result<Duration, Error> {
    match text.parse() {
        Ok(seconds @ 1..=LONGEST_SILENCE) => Ok(Duration::from_secs(seconds)),
        _ => Err(Error::invalid(
            &format!("s3://{bucket}"),
            "timeout is a number of seconds from 1 to 600",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(text: &str) -> Place {
        match Location::parse(text).unwrap() {
            Location::S3(place) => place,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn directories() {
        for text in ["/srv/a b", "file:///srv/a%20b"] {
            assert_eq!(
                Location::parse(text).unwrap(),
                Location::Directory("/srv/a b".into())
            );
        }
    }

    #[test]
    fn a_bucket_of_the_cloud_is_addressed_by_host() {
        let found = place("s3://bucket");
        assert!(found.virtual_style && found.endpoint.is_none() && found.prefix.is_empty());
    }

    #[test]
    fn all_options() {
        let found = place(
            "s3://b/one/two/?endpoint=http://127.0.0.1:9&region=eu-1&style=virtual&profile=p&timeout=3",
        );
        assert_eq!(
            (found.prefix.as_str(), found.virtual_style),
            ("one/two", true)
        );
        assert_eq!(found.region.as_deref(), Some("eu-1"));
        assert_eq!(found.profile.as_deref(), Some("p"));
        assert_eq!(found.silence, Duration::from_secs(3));
        assert_eq!(found.name(), "s3://b/one/two at http://127.0.0.1:9");
        assert!(!place("s3://b?endpoint=http://127.0.0.1:9").virtual_style);
    }

    #[test]
    fn what_is_refused_and_that_no_secret_is_repeated() {
        for text in [
            "",
            "relative/path",
            "ftp://a",
            "s3://",
            "s3:///x",
            "file://host/x",
            "file:///x?y=1",
            "s3://KEY:sesame@bucket",
            "s3://bucket?secret_access_key=sesame",
            "s3://b?style=x",
            "s3://b?endpoint=sesame",
            "s3://b?endpoint=http://u:sesame@h",
            "s3://b?timeout=0",
            "s3://b/a%20b",
            "s3://b/a//b",
            "s3://b?region=",
            "s3://b?endpoint=http://h/path",
        ] {
            let error = Location::parse(text).unwrap_err();
            assert_eq!(error.code(), "invalid", "{text}");
            assert!(!error.to_string().contains("sesame"), "{error}");
        }
    }
}
