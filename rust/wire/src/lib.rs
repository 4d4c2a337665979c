//! Control messages between the host and the guest agent: one JSON object a line.
//!
//! Request `{"id":N,"op":"...","args":{...}}`; reply `{"id":N,"ok":{...}}` or
//! `{"id":N,"error":{"code":"...","message":"..."}}`. The host may disconnect in the middle of a
//! line and starts every connection with a blank one; blank and unparsable lines are not requests.

pub mod sudo;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Version of this protocol, answered by `hello`.
pub const PROTOCOL: u32 = 1;
/// Longest line either side accepts, in bytes.
pub const MAX_LINE: usize = 4 << 20;

#[derive(Debug, Deserialize)]
pub struct Request {
    pub id: u64,
    #[serde(flatten)]
    pub op: Op,
}

/// What the host can ask.
#[derive(Debug, Deserialize)]
#[serde(tag = "op", content = "args", rename_all = "snake_case")]
pub enum Op {
    Hello(Empty),
    Init(Box<Init>),
    Ping(Empty),
    Clock(Clock),
    Stats(Empty),
    Sync(Empty),
    /// Everything written so far is on the disk, and nothing more is written until `thaw`; idempotent.
    /// Without `suspend` before it, processes that write hang in the middle of a call.
    Freeze(Empty),
    /// Idempotent.
    Thaw(Empty),
    /// No process of the user runs its code from the answer on until `release` or `init`.
    Suspend(Suspend),
    /// Idempotent.
    Release(Empty),
    Shutdown(Empty),
}

#[derive(Debug, Default, Deserialize)]
pub struct Empty {}

#[derive(Debug, Deserialize)]
#[serde(default)]
pub struct Suspend {
    /// How long to wait for the last process.
    pub deadline_ms: u64,
}

impl Default for Suspend {
    fn default() -> Self {
        Self { deadline_ms: 500 }
    }
}

#[derive(Debug, Deserialize)]
pub struct Clock {
    /// Nanoseconds since 1970, UTC.
    pub time_ns: i64,
}

/// Identity, clock, entropy and network of a generation. Kept by init, so that an agent that was
/// killed comes back initialised.
///
/// To a guest that has one already, a higher generation or another sandbox's says that it was
/// restored from a snapshot; the same one is set again; a lower one is refused (`stale_generation`).
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Init {
    pub generation: u64,
    pub sandbox_id: String,
    pub hostname: String,
    pub time_ns: i64,
    /// Base64 of random bytes for the kernel's generator.
    pub entropy: String,
    /// 32 hex digits.
    pub machine_id: String,
    /// `X-Access-Token` that the in-guest API demands; none: open.
    pub access_token: Option<String>,
    pub env: BTreeMap<String, String>,
    /// Name, uid, or either with `:group`.
    pub default_user: Option<String>,
    pub default_workdir: Option<String>,
    pub network: Option<Network>,
    /// Folders to make.
    pub volumes: Vec<String>,
    /// Where the control face is a TCP port: what the host says first from now on.
    pub control_key: Option<String>,
    /// What the guest may write and use, where its kernel does not know.
    pub disk_bytes: u64,
    pub memory_bytes: u64,
    /// To one that was restored: of what ran before only the disk stays, as after a boot.
    pub fresh: bool,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Network {
    /// IPv4 address with prefix length.
    pub address: String,
    pub gateway: String,
    pub dns: Vec<String>,
    pub mtu: u32,
}

#[derive(Debug, Serialize)]
pub struct Reply {
    pub id: Option<u64>,
    #[serde(flatten)]
    pub result: Outcome,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Ok(serde_json::Value),
    Error(Fault),
}

#[derive(Debug, Serialize)]
pub struct Fault {
    pub code: &'static str,
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_parse_with_and_without_arguments() {
        let ping: Request = serde_json::from_str(r#"{"id":1,"op":"ping","args":{}}"#).unwrap();
        assert!(matches!(ping.op, Op::Ping(_)) && ping.id == 1);
        let line = r#"{"id":2,"op":"init","args":{"generation":3,"env":{"A":"b"},"later":1}}"#;
        let Op::Init(init) = serde_json::from_str::<Request>(line).unwrap().op else {
            panic!("not an init");
        };
        assert_eq!((init.generation, init.env["A"].as_str()), (3, "b"));
        let line = r#"{"id":3,"op":"suspend","args":{}}"#;
        let Op::Suspend(suspend) = serde_json::from_str::<Request>(line).unwrap().op else {
            panic!("not a suspend");
        };
        assert_eq!(suspend.deadline_ms, 500);
        assert!(serde_json::from_str::<Request>(r#"{"id":1,"op":"fly","args":{}}"#).is_err());
    }

    #[test]
    fn replies_have_one_of_ok_and_error() {
        let ok = Reply {
            id: Some(1),
            result: Outcome::Ok(serde_json::json!({"a": 1})),
        };
        assert_eq!(
            serde_json::to_string(&ok).unwrap(),
            r#"{"id":1,"ok":{"a":1}}"#
        );
    }
}
