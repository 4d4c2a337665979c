//! What `init` does: at a guest's first start, again, and after it was restored from a snapshot.

use std::fs;
use std::sync::Arc;

use agentenv_wire::{Fault, Init};
use serde_json::{json, Value};

use super::{disk, fault, identity, network, now_ns, sockets};
use crate::init::container;
use crate::state::{Agent, PORT};
use crate::users::{Database, User};
use crate::{sudo, sys};

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    First,
    Again,
    Restore,
    Stale,
}

/// A copy is told its own sandbox, whose generations begin anew.
fn kind(before: Option<&Init>, given: &Init) -> Kind {
    match before {
        None => Kind::First,
        Some(before) if before.sandbox_id != given.sandbox_id => Kind::Restore,
        Some(before) if before.generation < given.generation => Kind::Restore,
        Some(before) if before.generation == given.generation => Kind::Again,
        Some(_) => Kind::Stale,
    }
}

/// Identity first, then the token becomes valid: nobody is served by a half-made guest. Processes
/// that a snapshot suspended go on last: none sees a state that a copy has as well.
pub fn initialise(init: Init, agent: &Arc<Agent>) -> Result<Value, Fault> {
    let before = agent.init();
    let kind = kind(before.as_deref(), &init);
    if kind == Kind::Stale {
        return Err(Fault {
            code: "stale_generation",
            message: format!("generation {} is over", init.generation),
        });
    }
    let restored = kind == Kind::Restore;
    if agent.is_machine() {
        sys::set_clock(init.time_ns).map_err(fault("clock"))?;
    }
    let clock_error = now_ns() - init.time_ns;
    let reseeded = agent.is_guest() && (!agent.is_machine() || reseed(&init, restored)?);
    if agent.is_guest() {
        assume(&init, before.as_deref(), agent)?;
    }
    if restored {
        agent.forget_events().map_err(fault("events"))?;
    }
    let dropped = if restored { drop_connections(agent) } else { 0 };
    let frozen = agent.freezer.holds();
    if restored && init.fresh {
        agent.freezer.end().map_err(fault("processes"))?;
        container::empty_memory();
    }
    agent.remember(init).map_err(fault("memory"))?;
    agent.go_on();
    let resumed = agent.freezer.release().map_err(fault("release"))?;
    if restored && agent.is_container() {
        let agent = Arc::clone(agent);
        std::thread::spawn(move || agent.must_wake());
    }
    let user = default_user(agent, restored)?;
    Ok(json!({
        "clock_error_ns": clock_error,
        "clock_is_hosts": !agent.is_machine(),
        "entropy_reseeded": reseeded,
        "default_user": user.name,
        "home": user.home,
        "restored": restored,
        "frozen": frozen,
        "connections_dropped": dropped,
        "resumed_processes": resumed,
    }))
}

/// Without fresh randomness a copy would draw what its siblings draw: it must not come to life.
fn reseed(init: &Init, restored: bool) -> Result<bool, Fault> {
    match identity::reseed(&init.entropy) {
        Err(error) if restored => Err(fault("entropy")(error)),
        result => Ok(result.is_ok()),
    }
}

fn assume(init: &Init, before: Option<&Init>, agent: &Agent) -> Result<(), Fault> {
    // Whoever starts this generation has what it froze the disk for.
    if agent.is_machine() {
        let thawed = agent.layers().and_then(|layers| disk::thaw(&layers.disk));
        thawed.map_err(fault("thaw"))?;
    }
    identity::assume(init, before);
    if let Some(wanted) = init.network.as_ref().filter(|_| agent.is_machine()) {
        let before = before.and_then(|before| before.network.as_ref());
        network::configure(wanted, before).map_err(fault("network"))?;
    }
    if !agent.is_machine() {
        sudo::place();
    }
    for path in &init.volumes {
        let _ = fs::create_dir_all(path);
    }
    Ok(())
}

/// Those to the agent, counted as it knows them, and those of user processes.
fn drop_connections(agent: &Agent) -> usize {
    let ours = agent.connections.drop_all();
    if !agent.is_machine() {
        return ours;
    }
    let others = sockets::end_inherited(PORT).unwrap_or_else(|error| {
        println!("agentenv-agent: connections of processes stay, to time out: {error}");
        0
    });
    ours + others
}

/// A restored guest may have lost its user since; that does not keep it from going on.
fn default_user(agent: &Agent, restored: bool) -> Result<User, Fault> {
    match agent.default_user() {
        Err(_) if restored => Ok(Database::load().fallback()),
        result => result.map_err(|message| Fault {
            code: "user",
            message,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn init(sandbox_id: &str, generation: u64) -> Init {
        Init {
            sandbox_id: sandbox_id.to_owned(),
            generation,
            ..Init::default()
        }
    }

    #[test]
    fn a_restore_is_told_by_generation_or_by_sandbox() {
        let before = init("a", 3);
        assert_eq!(kind(None, &init("a", 1)), Kind::First);
        for (given, wanted) in [
            (init("a", 4), Kind::Restore),
            (init("a", 9), Kind::Restore),
            (init("a", 3), Kind::Again),
            (init("a", 2), Kind::Stale),
            (init("b", 1), Kind::Restore),
            (init("b", 3), Kind::Restore),
        ] {
            assert_eq!(kind(Some(&before), &given), wanted, "{given:?}");
        }
    }
}
