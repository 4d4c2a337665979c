//! The operations on the control socket.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use agentenv_control::{hello, parse, Refusal};
use serde::Deserialize;
use serde_json::{json, Value};
use tokio_util::sync::CancellationToken;

use crate::dns::{Resolvers, SlotSpec};
use crate::forward::Edge;
use crate::route::SandboxId;
use crate::spec::RouteSpec;

const PROTOCOL: u32 = 1;
/// The longest that `wakes` waits: a client that left is noticed only then.
const LONGEST_POLL: f64 = 60.0;

/// What the operations act on.
#[derive(Clone)]
pub struct Control {
    pub edge: Arc<Edge>,
    pub resolvers: Arc<Resolvers>,
    pub draining: CancellationToken,
}

impl agentenv_control::Control for Control {
    async fn act(&self, op: &str, args: Value) -> Result<Value, Refusal> {
        match op {
            "hello" => Ok(hello(PROTOCOL, env!("CARGO_PKG_VERSION"))),
            "sync" => self.sync(parse(args)?).await,
            "put" => self.put(parse(args)?),
            "drop" => self.drop_route(&parse(args)?),
            "dns_up" => self.dns_up(parse(args)?).await,
            "dns_down" => self.dns_down(&parse(args)?).await,
            "wakes" => Ok(self.wakes(&parse(args)?).await),
            "wake_failed" => Ok(self.wake_failed(parse(args)?)),
            "stats" => Ok(self.stats()),
            "drain" => {
                self.draining.cancel();
                Ok(json!({}))
            }
            _ => Err(Refusal::unknown_op(op)),
        }
    }
}

impl Control {
    /// Full truth; what cannot be opened is reported and does not hinder the rest.
    async fn sync(&self, truth: Truth) -> Result<Value, Refusal> {
        let routes = self.edge.table.sync(truth.routes).into_iter();
        let routes: Vec<Value> = routes
            .map(|(id, error)| json!({"id": id, "message": error.to_string()}))
            .collect();
        let dns = self.resolvers.sync(truth.dns).await.into_iter();
        let dns: Vec<Value> = dns
            .map(|(slot, error)| json!({"slot": slot, "message": error.to_string()}))
            .collect();
        Ok(json!({"failed_routes": routes, "failed_dns": dns}))
    }

    fn put(&self, args: PutArgs) -> Result<Value, Refusal> {
        let done = self.edge.table.put(args.route);
        done.map_err(|error| Refusal::new("netns_unavailable", error))?;
        Ok(json!({}))
    }

    fn drop_route(&self, args: &DropArgs) -> Result<Value, Refusal> {
        let dropped = self.edge.table.drop_route(&args.id);
        Ok(json!({"dropped": dropped}))
    }

    async fn dns_up(&self, spec: SlotSpec) -> Result<Value, Refusal> {
        let done = self.resolvers.up(spec).await;
        done.map_err(|error| Refusal::new("dns_failed", error))?;
        Ok(json!({}))
    }

    async fn dns_down(&self, args: &SlotArgs) -> Result<Value, Refusal> {
        let dropped = self.resolvers.down(&args.slot).await;
        Ok(json!({"dropped": dropped}))
    }

    async fn wakes(&self, args: &WakesArgs) -> Value {
        let wait = Duration::from_secs_f64(args.timeout.clamp(0.0, LONGEST_POLL));
        let (version, ids) = self.edge.wakes.since(args.after, wait).await;
        json!({"version": version, "ids": ids})
    }

    fn wake_failed(&self, args: WakeFailedArgs) -> Value {
        json!({"told": self.edge.wakes.fail(&args.id, args.message)})
    }

    fn stats(&self) -> Value {
        let routes = self.edge.table.all();
        let sandboxes: BTreeMap<SandboxId, Value> = routes
            .iter()
            .map(|route| (route.id(), json!(route.activity().figures())))
            .collect();
        let totals = json!({
            "sandboxes": sandboxes.len(),
            "connections": self.edge.tasks.len(),
            "dns_queries": self.resolvers.queries(),
            "api": self.edge.api.activity.figures(),
        });
        json!({"sandboxes": sandboxes, "totals": totals})
    }
}

#[derive(Deserialize)]
struct Truth {
    routes: Vec<RouteSpec>,
    dns: Vec<SlotSpec>,
}

#[derive(Deserialize)]
struct PutArgs {
    route: RouteSpec,
}

#[derive(Deserialize)]
struct DropArgs {
    id: SandboxId,
}

/// `after` is the version known, -1 for none; `timeout` is in seconds.
#[derive(Deserialize)]
struct WakesArgs {
    after: i64,
    timeout: f64,
}

#[derive(Deserialize)]
struct WakeFailedArgs {
    id: SandboxId,
    message: String,
}

#[derive(Deserialize)]
struct SlotArgs {
    slot: String,
}
