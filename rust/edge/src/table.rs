//! The routes: which sandboxes there are and how each is reached.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use slab::Slab;
use tokio_util::sync::CancellationToken;

use crate::activity::Activity;
use crate::cut::Cut;
use crate::netns::NetNs;
use crate::pool::Pool;
use crate::route::SandboxId;
use crate::secret::Secret;
use crate::spec::{Place, Policy, Reach, RouteSpec};
use crate::wake::Sleep;

#[derive(Debug)]
pub struct Route {
    pub policy: Policy,
    pub way: Way,
}

impl Route {
    pub fn id(&self) -> SandboxId {
        match &self.way {
            Way::Open(link) => link.id,
            Way::Asleep(sleep) => sleep.id,
        }
    }

    pub fn activity(&self) -> &Arc<Activity> {
        match &self.way {
            Way::Open(link) => &link.activity,
            Way::Asleep(sleep) => &sleep.activity,
        }
    }
}

/// Where the sandbox's requests go now.
#[derive(Debug, Clone)]
pub enum Way {
    Open(Arc<Link>),
    Asleep(Arc<Sleep>),
}

impl Way {
    fn begin(id: SandboxId, place: Place, activity: Arc<Activity>) -> io::Result<Self> {
        Ok(match place {
            Place::Open(reach) => Self::Open(Link::open(id, reach, activity)?),
            Place::Asleep { wakes } => Self::Asleep(Arc::new(Sleep::new(id, wakes, activity))),
        })
    }

    /// Whether it leads there already.
    fn leads_to(&self, place: &Place) -> bool {
        match (self, place) {
            (Self::Open(link), Place::Open(reach)) => link.reach == *reach,
            (Self::Asleep(sleep), Place::Asleep { wakes }) => sleep.wakes == *wakes,
            _ => false,
        }
    }

    fn end(&self) {
        match self {
            Self::Open(link) => link.close(),
            Self::Asleep(sleep) => sleep.end(),
        }
    }
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
        let netns = NetNs::open(&reach.netns).map_err(|error| {
            let path = reach.netns.display();
            let why = format!("cannot open the network namespace {path}: {error}");
            io::Error::new(error.kind(), why)
        })?;
        Ok(Arc::new(Self {
            id,
            netns,
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

    /// Adds or replaces; connections of the same generation, namespace and address stay, and so do
    /// requests held for one that sleeps on.
    pub fn put(&self, spec: RouteSpec) -> io::Result<()> {
        let mut routes = self.routes.write();
        let old = routes.get(&spec.id).cloned();
        let kept = old.as_ref().filter(|old| old.way.leads_to(&spec.place));
        let replaced = old.as_ref().filter(|_| kept.is_none());
        let way = match kept {
            Some(old) => old.way.clone(),
            None => {
                let counted = old.as_ref().map(|old| Arc::clone(old.activity()));
                Way::begin(spec.id, spec.place, counted.unwrap_or_default())?
            }
        };
        let policy = spec.policy;
        routes.insert(spec.id, Arc::new(Route { policy, way }));
        drop(routes);
        if let Some(old) = replaced {
            old.way.end(); // after the insertion: who was held finds the new one
        }
        Ok(())
    }

    /// True if there was such a route.
    pub fn drop_route(&self, id: &SandboxId) -> bool {
        let removed = self.routes.write().remove(id);
        if let Some(route) = &removed {
            route.way.end();
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
