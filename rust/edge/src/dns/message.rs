//! As much of DNS messages as a forwarder needs (RFC 1035 4.1): header and question (pure).
//!
//! ```text
//! 0      2      4        6        8        10       12
//! | id   | flags| QDCOUNT| ANCOUNT| NSCOUNT| ARCOUNT| question ...
//! ```

const HEADER: usize = 12;
const RESPONSE: u8 = 0x80;
const OPCODE: u8 = 0x78;
const RECURSION_DESIRED: u8 = 0x01;
const RECURSION_AVAILABLE: u8 = 0x80;
const SERVFAIL: u8 = 2;
const REFUSED: u8 = 5;
const MAX_NAME: usize = 255;

/// A well-formed query with one question.
#[derive(Debug, PartialEq, Eq)]
pub struct Query<'a> {
    message: &'a [u8],
    /// The question as it stands: name, type, class. What may be asked is decided on this.
    question: &'a [u8],
}

impl<'a> Query<'a> {
    /// None for whatever is no standard query: it deserves no answer.
    pub fn parse(message: &'a [u8]) -> Option<Self> {
        let flags = *message.get(2)?;
        let standard = flags & (RESPONSE | OPCODE) == 0;
        let question = question(message)?;
        standard.then_some(Self { message, question })
    }

    pub fn id(&self) -> [u8; 2] {
        [self.message[0], self.message[1]]
    }

    /// The same query under another id.
    pub fn with_id(&self, id: [u8; 2]) -> Vec<u8> {
        let mut copy = self.message.to_vec();
        copy[..2].copy_from_slice(&id);
        copy
    }

    /// Whether `reply` can be the answer to this query as sent under `id`.
    pub fn is_answered_by(&self, id: [u8; 2], reply: &[u8]) -> bool {
        let head = reply.len() >= HEADER && reply[..2] == id && reply[2] & RESPONSE != 0;
        head && question(reply).is_some_and(|q| q.eq_ignore_ascii_case(self.question))
    }

    /// "Ask again later": no upstream answered.
    pub fn servfail(&self) -> Vec<u8> {
        let mut reply = self.message[..HEADER + self.question.len()].to_vec();
        reply[2] = RESPONSE | (self.message[2] & RECURSION_DESIRED);
        reply[3] = RECURSION_AVAILABLE | SERVFAIL;
        reply[6..HEADER].fill(0);
        reply
    }
}

/// Whether an upstream declined, so that the next one may know better.
pub fn declines(reply: &[u8]) -> bool {
    matches!(reply.get(3).map(|b| b & 0x0f), Some(SERVFAIL | REFUSED))
}

/// Name, type and class of the one question of a message.
fn question(message: &[u8]) -> Option<&[u8]> {
    let one = message.get(4..6)? == [0, 1];
    let name = name_length(message.get(HEADER..)?)?;
    let question = message.get(HEADER..HEADER + name + 4)?;
    one.then_some(question)
}

/// Bytes of an uncompressed name: labels of 1 to 63 bytes, then the root.
fn name_length(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        match *bytes.get(at)? {
            0 => return Some(at + 1),
            label @ 1..=63 => at += 1 + usize::from(label),
            _ => return None, // a pointer has nothing to point back to in a question
        }
        if at >= MAX_NAME {
            return None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(id: [u8; 2], flags: [u8; 2], name: &[u8]) -> Vec<u8> {
        let counts = [0, 1, 0, 0, 0, 0, 0, 0];
        [&id[..], &flags, &counts, name, &[0, 1, 0, 1]].concat()
    }

    const NAME: &[u8] = b"\x07example\x03org\x00";

    #[test]
    fn a_query_travels_under_another_id() {
        let bytes = message([1, 2], [1, 0], NAME);
        let query = Query::parse(&bytes).expect("a query");
        assert_eq!(query.id(), [1, 2]);
        let sent = query.with_id([9, 9]);
        assert_eq!((&sent[..2], &sent[2..]), (&[9, 9][..], &bytes[2..]));
    }

    #[test]
    fn what_is_no_query_is_none() {
        let good = message([1, 2], [1, 0], NAME);
        for length in 0..good.len() {
            assert_eq!(Query::parse(&good[..length]), None, "{length}");
        }
        let two = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            bytes
        };
        assert_eq!(Query::parse(&two(2, 0x80)), None, "a response");
        assert_eq!(Query::parse(&two(2, 0x28)), None, "an update");
        assert_eq!(Query::parse(&two(5, 2)), None, "two questions");
        assert_eq!(
            Query::parse(&message([0, 0], [1, 0], &[0xc0, 12])),
            None,
            "a pointer"
        );
        let long = [b"\x3f".as_slice(), &[b'a'; 63]].concat().repeat(4);
        let long = [&long[..], &[0]].concat();
        assert_eq!(
            Query::parse(&message([0, 0], [1, 0], &long)),
            None,
            "a long name"
        );
    }

    #[test]
    fn only_the_answer_to_the_question_counts() {
        let bytes = message([1, 2], [1, 0], NAME);
        let query = Query::parse(&bytes).expect("a query");
        let upper = b"\x07EXAMPLE\x03org\x00";
        assert!(query.is_answered_by([7, 7], &message([7, 7], [0x81, 0x80], upper)));
        assert!(
            !query.is_answered_by([7, 7], &message([7, 8], [0x81, 0x80], NAME)),
            "id"
        );
        assert!(
            !query.is_answered_by([7, 7], &message([7, 7], [1, 0], NAME)),
            "a query"
        );
        let other = b"\x07exbmple\x03org\x00";
        assert!(
            !query.is_answered_by([7, 7], &message([7, 7], [0x81, 0x80], other)),
            "name"
        );
        assert!(!query.is_answered_by([7, 7], b""), "nothing");
    }

    #[test]
    fn a_failure_repeats_the_question() {
        let mut bytes = message([1, 2], [1, 0x20], NAME);
        let bare = bytes.clone();
        bytes[11] = 1; // one additional record (EDNS) that the failure leaves out
        bytes.extend([0, 0, 41, 16, 0, 0, 0, 0, 0, 0, 0]);
        let query = Query::parse(&bytes).expect("a query");
        let failure = query.servfail();
        assert!(query.is_answered_by([1, 2], &failure));
        assert_eq!(failure.len(), bare.len());
        assert!(declines(&failure));
        assert_eq!(failure[2..4], [0x81, 0x82]);
    }
}
