//! Reading fields of bytes that nobody vouches for.

use thiserror::Error;

use crate::Id;

/// The bytes are not what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Damaged(pub &'static str);

/// Takes fields from the front; a field that is not there is `Damaged`.
pub(crate) struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], Damaged> {
        let (head, rest) = self.0.split_at_checked(count).ok_or(CUT_SHORT)?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Damaged> {
        self.take(N)?.try_into().map_err(|_| CUT_SHORT)
    }

    pub fn u16(&mut self) -> Result<u16, Damaged> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Result<u32, Damaged> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, Damaged> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn id(&mut self) -> Result<Id, Damaged> {
        self.array().map(Id)
    }
}

const CUT_SHORT: Damaged = Damaged("it is cut short");

/// Ends a table: the digest of all before it.
pub(crate) fn seal(mut bytes: Vec<u8>) -> Vec<u8> {
    let digest = Id::of(&bytes);
    bytes.extend_from_slice(&digest.0);
    bytes
}

/// What `seal` sealed.
pub(crate) fn unseal(bytes: &[u8]) -> Result<&[u8], Damaged> {
    let (body, digest) = bytes
        .len()
        .checked_sub(32)
        .and_then(|at| bytes.split_at_checked(at))
        .ok_or(CUT_SHORT)?;
    if Id::of(body).0 != digest {
        return Err(Damaged("its checksum does not fit"));
    }
    Ok(body)
}
