//! The routes: which sandboxes there are and how each is reached.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use serde::Deserialize;
use slab::Slab;
use tokio_util::sync::CancellationToken;

use crate::activity::Activity;
use crate::cut::Cut;
use crate::netns::NetNs;
use crate::pool::Pool;
use crate::route::SandboxId;
use crate::secret::Secret;

/// A route as the control client states it.
#[derive(Debug, Clone, Deserialize)]
pub struct RouteSpec {
    pub id: SandboxId,
    #[serde(flatten)]
    pub reach: Reach,
    #[serde(flatten)]
    pub policy: Policy,
}

/// What connections depend on: if any of it changes, they are of another life.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
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
    /// The agent's, for finding whose a signed URL is.
    #[serde(default)]
    pub access_token: Option<Secret>,
}

fn yes() -> bool {
    true
}

#[derive(Debug)]
pub struct Route {
    pub policy: Policy,
    pub link: Arc<Link>,
}

/// The way into one generation of one sandbox, with all that is open on it.
#[derive(Debug)]
pub struct Link {
    pub id: SandboxId,
    pub netns: NetNs,
    pub pool: Pool,
    pub activity: Arc<Activity>,
    /// Cancelled when the route is dropped.
    pub gone: CancellationToken,
    reach: Reach,
    streams: Mutex<Slab<Cut>>,
}

impl Link {
    fn open(id: SandboxId, reach: Reach, activity: Arc<Activity>) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            id,
            netns: NetNs::open(&reach.netns)?,
            pool: Pool::default(),
            activity,
            gone: CancellationToken::new(),
            reach,
            streams: Mutex::default(),
        }))
    }

    pub fn address(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.reach.address, port)
    }

    /// Notes what is being streamed, to be cut if the route goes; None: it has gone.
    pub fn enlist(&self, stream: Cut) -> Option<usize> {
        let mut streams = self.streams.lock();
        (!self.gone.is_cancelled()).then(|| streams.insert(stream))
    }

    pub fn discharge(&self, key: usize) {
        self.streams.lock().try_remove(key);
    }

    fn close(&self) {
        let streams = {
            let mut streams = self.streams.lock();
            self.gone.cancel(); // under the lock: after it nobody enlists
            std::mem::take(&mut *streams)
        };
        for (_, stream) in streams {
            stream.now();
        }
        self.pool.close();
    }
}

#[derive(Debug, Default)]
pub struct Table {
    routes: RwLock<HashMap<SandboxId, Arc<Route>>>,
    synced: AtomicBool,
}

impl Table {
    pub fn get(&self, id: &SandboxId) -> Option<Arc<Route>> {
        self.routes.read().get(id).cloned()
    }

    /// Whether a missing route means that there is no such sandbox.
    pub fn knows_all(&self) -> bool {
        self.synced.load(Ordering::Acquire)
    }

    pub fn all(&self) -> Vec<Arc<Route>> {
        self.routes.read().values().cloned().collect()
    }

    /// The sandbox whose token this is true of.
    pub fn find_by_token(&self, is_it: impl Fn(&Secret) -> bool) -> Option<Arc<Route>> {
        let mut routes = self.all().into_iter(); // not under the lock: there may be many
        routes.find(|route| route.policy.access_token.as_ref().is_some_and(&is_it))
    }

    /// Adds or replaces; connections of the same generation, namespace and address stay.
    pub fn put(&self, spec: RouteSpec) -> io::Result<()> {
        let mut routes = self.routes.write();
        let old = routes.get(&spec.id).map(|route| Arc::clone(&route.link));
        let kept = old.clone().filter(|link| link.reach == spec.reach);
        let link = match kept {
            Some(link) => link,
            None => {
                let counted = old.as_ref().map(|link| Arc::clone(&link.activity));
                Link::open(spec.id, spec.reach, counted.unwrap_or_default())?
            }
        };
        let route = Route {
            policy: spec.policy,
            link: Arc::clone(&link),
        };
        routes.insert(spec.id, Arc::new(route));
        drop(routes);
        if let Some(old) = old.filter(|old| !Arc::ptr_eq(old, &link)) {
            old.close();
        }
        Ok(())
    }

    /// True if there was such a route.
    pub fn drop_route(&self, id: &SandboxId) -> bool {
        let removed = self.routes.write().remove(id);
        if let Some(route) = &removed {
            route.link.close();
        }
        removed.is_some()
    }

    /// Makes `specs` the whole truth. Answers those that could not be opened, with the reason.
    pub fn sync(&self, specs: Vec<RouteSpec>) -> Vec<(SandboxId, io::Error)> {
        let wanted: HashSet<SandboxId> = specs.iter().map(|spec| spec.id).collect();
        let known: Vec<SandboxId> = self.routes.read().keys().copied().collect();
        for id in known.iter().filter(|id| !wanted.contains(id)) {
            self.drop_route(id);
        }
        let failed = specs
            .into_iter()
            .filter_map(|spec| Some((spec.id, self.put(spec).err()?)))
            .collect();
        self.synced.store(true, Ordering::Release);
        failed
    }
}
