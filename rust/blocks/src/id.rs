//! Names: BLAKE3 digests.

use std::fmt;
use std::str::FromStr;

use crate::Damaged;

/// A BLAKE3 digest: of a chunk's bytes, of a layer's meaning, of a pack's bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(pub [u8; 32]);

impl Id {
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// Its first eight bytes: enough to look it up, not to be sure.
    pub fn short(&self) -> u64 {
        let mut head = [0; 8];
        head.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(head)
    }
}

impl fmt::Display for Id {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{self}")
    }
}

impl FromStr for Id {
    type Err = Damaged;

    /// 64 lower-case hex digits.
    fn from_str(text: &str) -> Result<Self, Damaged> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(Damaged("a name has not 64 digits"));
        }
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(Damaged("a name has other than hex digits")),
        };
        let mut found = [0; 32];
        for (byte, pair) in found.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Ok(Self(found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_reads_back() {
        let id = Id::of(b"abc");
        assert_eq!(id.to_string().parse::<Id>().unwrap(), id);
        // BLAKE3 of "abc", from its published test vectors.
        assert!(id.to_string().starts_with("6437b3ac38465133"));
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in ["", "00", &"0".repeat(63), &"G".repeat(64), &"A".repeat(64)] {
            assert!(text.parse::<Id>().is_err(), "{text}");
        }
    }
}
