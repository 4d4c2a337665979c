//! Tokens: never shown, compared without telling where they differ.

use std::fmt;

use serde::Deserialize;

#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// Whether `shown` is this token; an empty one opens nothing.
    pub fn is(&self, shown: &[u8]) -> bool {
        !self.0.is_empty() && same(self.as_bytes(), shown)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

/// Comparison whose time does not tell where two values differ.
pub fn same(a: &[u8], b: &[u8]) -> bool {
    let differing = a.iter().zip(b).fold(0, |sum, (x, y)| sum | (x ^ y));
    a.len() == b.len() && std::hint::black_box(differing) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_not_shown() {
        assert_eq!(format!("{:?}", Secret::from("tok")), "Secret");
    }

    #[test]
    fn comparison_is_by_content_and_empty_opens_nothing() {
        assert!(Secret::from("tok").is(b"tok"));
        for wrong in ["", "to", "tokk", "Tok"] {
            assert!(!Secret::from("tok").is(wrong.as_bytes()), "{wrong}");
        }
        assert!(!Secret::from("").is(b""));
    }
}
