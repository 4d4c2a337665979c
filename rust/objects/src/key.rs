//! Keys: what both kinds of store can hold under the same name.

use std::ops::Range;

use crate::error::{Error, Fault};

/// The folder of a directory store where objects are written before they have a name.
pub(crate) const DRAFTS: &str = "drafts";
const LONGEST: usize = 512;
const LONGEST_SEGMENT: usize = 255;

/// Segments of `[a-z0-9._-]` between slashes, none empty or beginning with a dot, the first one
/// not `drafts`; 512 bytes at most.
pub fn check_key(key: &str) -> Result<(), Error> {
    match key_fault(key) {
        None => Ok(()),
        Some(cause) => Err(refused(key, cause)),
    }
}

/// Empty, or the beginning of a key up to a slash.
pub fn check_prefix(prefix: &str) -> Result<(), Error> {
    if prefix.is_empty() {
        return Ok(());
    }
    match prefix.strip_suffix('/') {
        Some(folder) => check_key(folder),
        None => Err(refused(prefix, "a prefix ends with a slash")),
    }
}

/// How many bytes `range` has; one that ends before it begins is the caller's fault.
pub(crate) fn range_length(key: &str, range: &Range<u64>) -> Result<usize, Error> {
    let length = range
        .end
        .checked_sub(range.start)
        .and_then(|n| usize::try_from(n).ok());
    length.ok_or_else(|| refused(key, "the range ends before it begins"))
}

fn key_fault(key: &str) -> Option<&'static str> {
    let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"._/-".contains(&c);
    if key.len() > LONGEST {
        return Some("a key has 512 bytes at most");
    }
    if !key.bytes().all(allowed) {
        return Some("a key is of a-z, 0-9, dot, underscore, dash and slash");
    }
    if key
        .split('/')
        .any(|segment| segment.is_empty() || segment.starts_with('.'))
    {
        return Some("no part of a key is empty or begins with a dot");
    }
    if key
        .split('/')
        .any(|segment| segment.len() > LONGEST_SEGMENT)
    {
        return Some("a part of a key has 255 bytes at most");
    }
    (key.split('/').next() == Some(DRAFTS)).then_some("the store keeps `drafts` for itself")
}

fn refused(key: &str, cause: &str) -> Error {
    let shown: String = key.escape_default().take(80).collect();
    Error::Invalid(Fault::new("key", &shown, cause))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_are_taken() {
        for key in ["a", "pack/ab12", "a.b_c-d/e", "pack/drafts"] {
            assert!(check_key(key).is_ok(), "{key}");
        }
    }

    #[test]
    fn keys_that_are_refused() {
        let long = "a".repeat(513);
        for key in [
            "",
            "/",
            "/a",
            "a/",
            "a//b",
            "..",
            "a/../b",
            "a/..b",
            ".a",
            "A",
            "a b",
            "a\0b",
            "é",
            "drafts",
            "drafts/a",
            &long,
            &long[..256],
        ] {
            assert_eq!(check_key(key).unwrap_err().code(), "invalid", "{key:?}");
        }
    }

    #[test]
    fn a_prefix_is_empty_or_a_folder() {
        assert!(check_prefix("").is_ok() && check_prefix("pack/").is_ok());
        for prefix in ["pack", "/", "../", "a//"] {
            assert!(check_prefix(prefix).is_err(), "{prefix:?}");
        }
    }
}
