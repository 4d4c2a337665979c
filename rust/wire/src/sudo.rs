//! What the `sudo` of a sandbox whose kernel ignores set-user-id bits asks of the agent.
//!
//! To the abstract unix socket `ADDRESS`: one byte with the caller's three standard streams, a
//! length, a `Call`; then a byte for each signal that the caller got. Back: the exit code.

/// Of the abstract unix socket.
pub const ADDRESS: &[u8] = b"agentenv-sudo";
/// The image's own, which does the work.
pub const REAL: &str = "/usr/bin/sudo";
/// Longest encoded call in bytes: beyond what Linux takes as arguments and environment.
pub const MAX_CALL: usize = 8 << 20;

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Call {
    pub folder: Vec<u8>,
    pub umask: u32,
    pub arguments: Vec<Vec<u8>>,
    /// `NAME=value`.
    pub environment: Vec<Vec<u8>>,
}

impl Call {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.umask.to_le_bytes().to_vec();
        put(&mut out, &self.folder);
        for list in [&self.arguments, &self.environment] {
            out.extend((list.len() as u32).to_le_bytes());
            for each in list {
                put(&mut out, each);
            }
        }
        out
    }

    /// None: it is none.
    pub fn decode(mut data: &[u8]) -> Option<Self> {
        let umask = number(&mut data)?;
        let folder = text(&mut data)?;
        let arguments = list(&mut data)?;
        let environment = list(&mut data)?;
        data.is_empty().then_some(Self {
            folder,
            umask,
            arguments,
            environment,
        })
    }
}

fn put(out: &mut Vec<u8>, data: &[u8]) {
    out.extend((data.len() as u32).to_le_bytes());
    out.extend(data);
}

fn number(data: &mut &[u8]) -> Option<u32> {
    let (head, rest) = data.split_first_chunk()?;
    *data = rest;
    Some(u32::from_le_bytes(*head))
}

fn text(data: &mut &[u8]) -> Option<Vec<u8>> {
    let length = number(data)? as usize;
    let (head, rest) = data.split_at_checked(length)?;
    *data = rest;
    Some(head.to_vec())
}

fn list(data: &mut &[u8]) -> Option<Vec<Vec<u8>>> {
    let count = number(data)?;
    (0..count).map(|_| text(data)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_arrives_as_it_was_sent() {
        let call = Call {
            folder: b"/srv".to_vec(),
            umask: 0o27,
            arguments: vec![b"-n".to_vec(), Vec::new(), b"\xff".to_vec()],
            environment: vec![b"A=b=c".to_vec()],
        };
        let sent = call.encode();
        assert_eq!(Call::decode(&sent), Some(call));
        for cut in 0..sent.len() {
            assert_eq!(Call::decode(&sent[..cut]), None);
        }
        assert_eq!(Call::decode(&[sent, vec![0]].concat()), None);
        assert_eq!(Call::decode(&[0xff; 64]), None);
    }
}
