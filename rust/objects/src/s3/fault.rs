//! What an answer of the store, or none, means to its user.

use std::error::Error as StdError;
use std::path::Path;

use object_store::Error as Failure;

use crate::error::{Error, Fault};

const CAUSE: usize = 600;
const STATUS: &str = "Server returned non-2xx status code: ";

pub(super) fn explain(store: &str, key: &str, error: &Failure) -> Error {
    let fault = Fault::new(store, key, cause(error));
    if says(error, "NoSuchBucket") {
        return Error::Invalid(Fault {
            cause: "there is no such bucket".into(),
            ..fault
        });
    }
    match error {
        Failure::NotFound { .. } => Error::NotFound(Fault {
            cause: String::new(),
            ..fault
        }),
        Failure::PermissionDenied { .. } | Failure::Unauthenticated { .. } => Error::Denied(fault),
        _ => by_status(error, fault),
    }
}

fn by_status(error: &Failure, fault: Fault) -> Error {
    match status(error) {
        Some(401 | 403) => Error::Denied(fault),
        Some(404) => Error::NotFound(fault),
        Some(507) => Error::Full(fault),
        _ if full(error) => Error::Full(fault),
        Some(416) => Error::Damaged(fault),
        Some(408 | 409 | 429 | 500..) => Error::Unavailable(fault),
        Some(300..=499) => Error::Invalid(fault),
        _ if says(error, "AccessDenied") => Error::Denied(fault),
        // No answer, one that stopped, or one that fits no question: another may be better.
        _ if matches!(error, Failure::Generic { .. }) => Error::Unavailable(fault),
        _ => Error::Io(fault),
    }
}

/// The server does not know this kind of request.
pub(super) fn unsupported(error: &Failure) -> bool {
    matches!(
        error,
        Failure::NotImplemented { .. } | Failure::NotSupported { .. }
    ) || matches!(status(error), Some(405 | 501))
        || (status(error) == Some(400) && says(error, "NotImplemented"))
}

/// As `unsupported`, of a request to delete many; deleting one will tell if it was the request.
pub(super) fn refuses_many(error: &Failure) -> bool {
    unsupported(error) || matches!(status(error), Some(400 | 404 | 411))
}

/// The caller's own file, not the store's.
pub(super) fn of_file(store: &str, key: &str, path: &Path, error: &std::io::Error) -> Error {
    let fault = Fault::new(store, key, format!("{}: {error}", path.display()));
    match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Error::Full(fault),
        _ => Error::Io(fault),
    }
}

fn full(error: &Failure) -> bool {
    [
        "QuotaExceeded",
        "InsufficientStorage",
        "StorageFull",
        "no space left",
    ]
    .iter()
    .any(|word| says(error, word))
}

/// The library keeps the type of this error to itself, so its words are read; the tests on a real
/// server hold them.
fn status(error: &Failure) -> Option<u16> {
    chain(error).find_map(|part| {
        let text = part.to_string();
        text.strip_prefix(STATUS)?.get(..3)?.parse().ok()
    })
}

fn says(error: &Failure, word: &str) -> bool {
    chain(error).any(|part| part.to_string().contains(word))
}

fn chain(error: &Failure) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    Chain(Some(error))
}

struct Chain<'a>(Option<&'a (dyn StdError + 'static)>);

impl<'a> Iterator for Chain<'a> {
    type Item = &'a (dyn StdError + 'static);

    fn next(&mut self) -> Option<Self::Item> {
        let part = self.0?;
        self.0 = part.source();
        Some(part)
    }
}

/// The innermost words, those around them repeat the address; of an XML answer, what it says.
fn cause(error: &Failure) -> String {
    let text = chain(error)
        .last()
        .map(ToString::to_string)
        .unwrap_or_default();
    let text = match (element(&text, "Code"), element(&text, "Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code.to_owned(),
        _ => text,
    };
    text.chars().take(CAUSE).collect()
}

fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>"))
        .map(|(inside, _)| inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(words: &str) -> Failure {
        Failure::Generic {
            store: "S3",
            source: words.into(),
        }
    }

    #[test]
    fn what_statuses_mean() {
        for (words, code) in [
            (
                "Server returned non-2xx status code: 507 Insufficient Storage: ",
                "full",
            ),
            (
                "Server returned non-2xx status code: 500 x: <Code>QuotaExceeded</Code>",
                "full",
            ),
            (
                "Server returned non-2xx status code: 503 Service Unavailable: ",
                "unavailable",
            ),
            (
                "Server returned non-2xx status code: 429 Too Many Requests: ",
                "unavailable",
            ),
            (
                "Server returned non-2xx status code: 416 Range: ",
                "damaged",
            ),
            (
                "Server returned non-2xx status code: 400 Bad Request: ",
                "invalid",
            ),
            (
                "Server returned non-2xx status code: 404 x: <Code>NoSuchBucket</Code>",
                "invalid",
            ),
            (
                "Server returned error response: <Code>InternalError</Code>",
                "unavailable",
            ),
            (
                "Server returned non-2xx status code: 403 Forbidden: ",
                "denied",
            ),
            ("something else", "unavailable"),
        ] {
            assert_eq!(
                explain("store", "key", &failure(words)).code(),
                code,
                "{words}"
            );
        }
    }

    #[test]
    fn of_an_answer_in_xml_only_its_words_are_told() {
        let words =
            "Server returned non-2xx status code: 400 x: <E><Code>C</Code><Message>M</Message></E>";
        assert_eq!(
            explain("s", "k", &failure(words)).to_string(),
            "s: k: invalid: C: M"
        );
    }

    #[test]
    fn what_a_server_does_not_know() {
        assert!(unsupported(&failure(
            "Server returned non-2xx status code: 501 x: "
        )));
        assert!(unsupported(&failure(
            "Server returned non-2xx status code: 400 x: NotImplemented"
        )));
        assert!(!unsupported(&failure(
            "Server returned non-2xx status code: 400 x: "
        )));
    }
}
