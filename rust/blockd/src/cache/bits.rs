//! Bits that many threads set and read.

use std::sync::atomic::{AtomicU64, Ordering};

/// A fixed number of bits, all clear at first.
pub struct Bits(Box<[AtomicU64]>);

impl Bits {
    pub fn new(count: u32) -> Self {
        let words = (count as usize).div_ceil(64);
        Self((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    pub fn get(&self, bit: u32) -> bool {
        self.0[bit as usize / 64].load(Ordering::Acquire) >> (bit % 64) & 1 == 1
    }

    /// Sets a bit; whether it was clear.
    pub fn set(&self, bit: u32) -> bool {
        let mask = 1 << (bit % 64);
        let word = &self.0[bit as usize / 64];
        // Reads are far more frequent than changes: no write to a shared line without need.
        word.load(Ordering::Acquire) & mask == 0
            && word.fetch_or(mask, Ordering::AcqRel) & mask == 0
    }

    /// Clears a bit; whether it was set.
    pub fn clear(&self, bit: u32) -> bool {
        let mask = 1 << (bit % 64);
        self.0[bit as usize / 64].fetch_and(!mask, Ordering::AcqRel) & mask != 0
    }
}

#[cfg(test)]
mod tests {
    use super::Bits;

    #[test]
    fn each_bit_is_its_own() {
        let bits = Bits::new(130);
        assert!(bits.set(0) && bits.set(63) && bits.set(64) && bits.set(129));
        assert!(!bits.set(64));
        let found: Vec<u32> = (0..130).filter(|bit| bits.get(*bit)).collect();
        assert_eq!(found, [0, 63, 64, 129]);
        assert!(bits.clear(63) && !bits.clear(63));
        assert!(!bits.get(63) && bits.get(64));
    }
}
