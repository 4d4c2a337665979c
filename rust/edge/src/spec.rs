//! A route as the control client states it (pure).

use std::net::{AddrParseError, IpAddr};
use std::path::PathBuf;

use serde::Deserialize;

use crate::route::SandboxId;
use crate::secret::Secret;

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Stated")]
pub struct RouteSpec {
    pub id: SandboxId,
    pub place: Place,
    pub policy: Policy,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    Open(Reach),
    /// It has no machine; with `wakes` a request is held until it has one again.
    Asleep {
        wakes: bool,
    },
}

/// What connections depend on: if any of it changes, they are of another life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reach {
    pub generation: u64,
    pub netns: PathBuf,
    pub address: IpAddr,
}

/// Who may come in, and under which name the guest is asked; may change while streams run.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Policy {
    #[serde(default = "yes")]
    pub public: bool,
    #[serde(default)]
    pub traffic_token: Option<Secret>,
    #[serde(default)]
    pub mask_host: Option<String>,
    /// The agent's, for finding whose a signed URL is, and for who may wake.
    #[serde(default)]
    pub access_token: Option<Secret>,
}

fn yes() -> bool {
    true
}

/// The fields as they are sent; one that sleeps may leave `netns` and `address` empty.
#[derive(Deserialize)]
struct Stated {
    id: SandboxId,
    generation: u64,
    netns: PathBuf,
    address: String,
    #[serde(default)]
    asleep: bool,
    #[serde(default)]
    wakes: bool,
    #[serde(flatten)]
    policy: Policy,
}

impl TryFrom<Stated> for RouteSpec {
    type Error = AddrParseError;

    fn try_from(stated: Stated) -> Result<Self, AddrParseError> {
        let place = if stated.asleep {
            Place::Asleep {
                wakes: stated.wakes,
            }
        } else {
            Place::Open(Reach {
                generation: stated.generation,
                netns: stated.netns,
                address: stated.address.parse()?,
            })
        };
        Ok(Self {
            id: stated.id,
            place,
            policy: stated.policy,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{json, Value};

    fn spec(more: &Value) -> Result<RouteSpec, String> {
        let mut stated = json!({"id": "a".repeat(20), "generation": 3, "netns": "", "address": ""});
        let fields = stated.as_object_mut().expect("an object");
        fields.extend(more.as_object().expect("an object").clone());
        serde_json::from_value(stated).map_err(|error| error.to_string())
    }

    #[test]
    fn one_that_runs_says_where() {
        let open = spec(&json!({"netns": "/n", "address": "10.0.0.1", "public": false}));
        let open = open.expect("a legal route");
        let reach = Reach {
            generation: 3,
            netns: "/n".into(),
            address: [10, 0, 0, 1].into(),
        };
        assert_eq!(open.place, Place::Open(reach));
        assert!(!open.policy.public);
        assert!(spec(&json!({})).is_err_and(|why| why.contains("address")));
    }

    #[test]
    fn one_that_sleeps_need_not() {
        for (more, wakes) in [
            (json!({"asleep": true}), false),
            (
                json!({"asleep": true, "wakes": true, "access_token": "tok"}),
                true,
            ),
        ] {
            let asleep = spec(&more).expect("a legal route");
            assert_eq!(asleep.place, Place::Asleep { wakes });
        }
    }
}
