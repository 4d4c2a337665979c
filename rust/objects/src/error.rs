//! What can go wrong, by what the caller can do about it.

use std::fmt;

/// Where it happened and why, for a message that needs no context.
#[derive(Debug, Clone)]
pub struct Fault {
    pub store: String,
    /// Empty where the whole store is meant.
    pub key: String,
    pub cause: String,
}

#[derive(Debug, Clone)]
pub enum Error {
    /// There is no such object.
    NotFound(Fault),
    /// The store is there and refuses.
    Denied(Fault),
    /// Network, timeout, trouble of the server: worth another try later.
    Unavailable(Fault),
    /// No space, or none left to this user.
    Full(Fault),
    /// The object is shorter, or larger, than it must be.
    Damaged(Fault),
    /// The URL, the configuration or the call is wrong.
    Invalid(Fault),
    Io(Fault),
}

impl Error {
    pub(crate) fn invalid(store: &str, cause: impl fmt::Display) -> Self {
        Self::Invalid(Fault::new(store, "", cause))
    }

    /// Whether the same call may succeed later.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }

    /// Stable across versions.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "not_found",
            Self::Denied(_) => "denied",
            Self::Unavailable(_) => "unavailable",
            Self::Full(_) => "full",
            Self::Damaged(_) => "damaged",
            Self::Invalid(_) => "invalid",
            Self::Io(_) => "io",
        }
    }

    pub fn fault(&self) -> &Fault {
        match self {
            Self::NotFound(fault)
            | Self::Denied(fault)
            | Self::Unavailable(fault)
            | Self::Full(fault)
            | Self::Damaged(fault)
            | Self::Invalid(fault)
            | Self::Io(fault) => fault,
        }
    }

    fn words(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "not found",
            Self::Denied(_) => "access denied",
            Self::Unavailable(_) => "unavailable",
            Self::Full(_) => "no space left",
            Self::Damaged(_) => "damaged",
            Self::Invalid(_) => "invalid",
            Self::Io(_) => "failed",
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { store, key, cause } = self.fault();
        write!(out, "{store}: ")?;
        if !key.is_empty() {
            write!(out, "{key}: ")?;
        }
        write!(out, "{}", self.words())?;
        if !cause.is_empty() {
            write!(out, ": {cause}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

impl Fault {
    pub(crate) fn new(store: &str, key: &str, cause: impl fmt::Display) -> Self {
        Self {
            store: store.to_owned(),
            key: key.to_owned(),
            cause: cause.to_string(),
        }
    }
}
